"""Support for Ascend NPUs."""
