"""Resources that must be available before a step is planned: slots, blocks, masks and pixels."""
