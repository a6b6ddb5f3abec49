"""A model and its batch on the device."""
