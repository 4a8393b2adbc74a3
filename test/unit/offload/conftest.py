import torch

torch.set_num_threads(1)  # the tensors are tiny; threads that wait for each other would cost a hundred times the work
