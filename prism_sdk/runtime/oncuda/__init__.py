"""What a rank on a GPU needs beyond one on a CPU: device numbers, stream order, memory, event times.

Responsible for CUDA alone; what a communication does is the modes' business, and answering for GPUs on a CPU oncpu's.
Nothing here opens a GPU before the program does, and nothing is called for tensors on a CPU.
"""
