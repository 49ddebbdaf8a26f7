# SPDX-License-Identifier: Apache-2.0
"""Signals of a real GPU under known loads, beside nvidia-smi's; needs PyTorch and a GPU.

python -m bench.signals OUT      loads, capture, dmon and pmon into the folder OUT
python -m bench.signals.compare OUT    their figures side by side; needs no GPU
"""
