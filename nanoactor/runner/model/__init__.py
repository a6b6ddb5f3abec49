"""The model and the batch that reside on the device."""
