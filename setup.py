"""Find the packages below the four roots; everything else is in pyproject.toml."""

from setuptools import find_packages, setup

ROOTS = {"slotline": "core", "slotline.plugins": "plugins", "slotline.kernels": "kernels", "slotline.apis": "apis"}
setup(packages=[*ROOTS, *(f"{name}.{sub}" for name, folder in ROOTS.items() for sub in find_packages(folder))])
