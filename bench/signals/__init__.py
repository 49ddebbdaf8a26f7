# SPDX-License-Identifier: Apache-2.0
"""Signals of a real GPU under known loads, beside nvidia-smi's; needs PyTorch, a GPU and root.

python -m bench.signals OUT              loads, captures, a page, dmon and pmon into the folder OUT
python -m bench.signals.agreement OUT    their figures side by side; needs no GPU
"""
