import torch
from hypothesis import settings

settings.register_profile("reproducible", deadline=None, derandomize=True)
settings.load_profile("reproducible")

torch.set_num_threads(1)  # the tensors of a test are too small for more
