"""One generation batch and its slices, as tensors: how rows are named, ordered, cut and put together again. Pure."""
