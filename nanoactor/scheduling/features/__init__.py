"""Optional parts of the scheduler: grammars, pictures, forking, held sequences and pooling."""
