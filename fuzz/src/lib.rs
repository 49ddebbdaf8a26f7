// SPDX-License-Identifier: Apache-2.0
//! What the fuzz targets share: the files that inputs become, and what must hold of tables.
pub mod input;
pub mod sound;
