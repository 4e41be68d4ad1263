"""What the tests share: oracles in double precision and the tensors around a bare KvStore."""
