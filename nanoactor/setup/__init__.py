"""The configuration that actors receive."""
