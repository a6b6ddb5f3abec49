"""Resources that a step needs before it can be planned: slots, blocks, masks and pixels."""
