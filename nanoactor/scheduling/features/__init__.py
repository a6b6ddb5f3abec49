"""Optional parts of the scheduler: grammars, images, forking, held sequences and pooling."""
