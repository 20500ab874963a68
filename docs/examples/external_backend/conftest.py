pytest_plugins = ["slotline.testing"]
