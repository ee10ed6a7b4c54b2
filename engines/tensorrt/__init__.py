"""TensorRT engines on green contexts: loaded, bound, captured as CUDA graphs, and run."""
