# SPDX-License-Identifier: Apache-2.0
"""What all of Sonde costs a program, from the first second on."""
