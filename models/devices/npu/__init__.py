"""The Ascend NPU backend: the device, its attention, and its captured steps."""
