// SPDX-License-Identifier: Apache-2.0
//! What the fuzz targets share: the native module's readers, compiled without Python, and the files
//! that inputs become.
#![allow(dead_code, reason = "a target uses a part of what the native module does")]

#[path = "../../native/src/elf"]
pub mod elf {
    pub mod file;
    pub mod functions;
    pub mod probe;
    pub mod record;
    pub mod site;
}

#[path = "../../native/src/symbols"]
pub mod symbols {
    pub mod index;
    pub mod jit_code;
    pub mod names;
}

#[path = "../../native/src/unwind"]
pub mod unwind {
    pub mod cpython;
    pub mod go;
    pub mod handlers;
    pub mod plain;
    pub mod prologue;
    pub mod rules;
    pub mod saved;
    pub mod section;
    pub mod table;
}

#[path = "../../native/src/lines"]
pub mod lines {
    pub mod dwarf;
}

pub mod image;
pub mod input;
pub mod sound;
