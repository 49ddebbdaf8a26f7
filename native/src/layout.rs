// SPDX-License-Identifier: Apache-2.0
//! The layouts of a BPF object's structs, as its BTF has them: user space reads fields by name, so each
//! struct is declared in C alone.
use libbpf_rs::btf::types::{self, Composite, Int, IntEncoding};
use libbpf_rs::btf::{Btf, BtfType, TypeId};
use libbpf_rs::{AsRawLibbpf, HasSize};
use pyo3::prelude::*;
use pyo3::types::PyInt;

/// Arrays of up to this many integers are read as fields, others not at all.
const SHORT_ARRAY: usize = 32;

/// One integer field of a struct.
#[derive(Clone, Debug)]
pub struct Field {
    pub name: String,
    pub offset: usize,
    pub size: usize,
    pub signed: bool,
}

impl Field {
    /// The field's 64 bits in `row`, sign-extended where it is signed.
    pub fn read(&self, row: &[u8]) -> u64 {
        let mut raw = [0u8; 8];
        raw[..self.size].copy_from_slice(&row[self.offset..self.offset + self.size]);
        let value = u64::from_le_bytes(raw);
        let unused = 64 - 8 * self.size as u32;
        if self.signed {
            (((value << unused) as i64) >> unused) as u64
        } else {
            value
        }
    }
}

impl Field {
    /// The field in `row` as a Python number.
    pub fn number<'py>(&self, py: Python<'py>, row: &[u8]) -> Bound<'py, PyInt> {
        let bits = self.read(row);
        let number =
            if self.signed { (bits as i64).into_pyobject(py) } else { bits.into_pyobject(py) };
        number.unwrap_or_else(|never| match never {})
    }
}

/// A struct: its integer fields in order of declaration, its texts, and its size in bytes.
#[derive(Clone, Debug, Default)]
pub struct Layout {
    pub fields: Vec<Field>,
    pub texts: Vec<Text>,
    pub size: usize,
}

/// A field of bytes with a text, which a NUL or the field's end ends.
#[derive(Clone, Debug)]
pub struct Text {
    pub name: String,
    pub offset: usize,
    pub size: usize,
}

impl Text {
    pub fn read<'a>(&self, row: &'a [u8]) -> &'a [u8] {
        let raw = &row[self.offset..self.offset + self.size];
        raw.split(|byte| *byte == 0).next().unwrap_or_default()
    }
}

impl Layout {
    pub fn field(&self, name: &str) -> Option<&Field> {
        self.fields.iter().find(|field| field.name == name)
    }
}

/// (bytes, whether it is signed) of an integer type.
fn integer(ty: BtfType<'_>) -> Option<(usize, bool)> {
    let int = Int::try_from(ty.skip_mods_and_typedefs()).ok()?;
    Some((usize::from(int.bits.div_ceil(8)), matches!(int.encoding, IntEncoding::Signed)))
}

/// The layout of a type: a struct's integer fields, or one field `value` for a bare integer.
/// Of a short array of integers each one is a field, called `name_0` and so on; an array of bytes is
/// a text. Padding (`unused…`) and all other members are left out.
pub fn of_type(btf: &Btf<'_>, id: u32) -> Option<Layout> {
    let ty: BtfType<'_> = btf.type_by_id(TypeId::from(id))?;
    let ty = ty.skip_mods_and_typedefs();
    if let Some((size, signed)) = integer(ty) {
        let field = Field { name: "value".into(), offset: 0, size, signed };
        return Some(Layout { fields: vec![field], size, ..Default::default() });
    }
    let composite = Composite::try_from(ty).ok()?;
    let (mut fields, mut texts) = (Vec::new(), Vec::new());
    for member in composite.iter() {
        let name = member.name.map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
        let types::MemberAttr::Normal { offset } = member.attr else { continue };
        if name.starts_with("unused") {
            continue;
        }
        let Some(ty) = btf.type_by_id::<BtfType<'_>>(member.ty) else { continue };
        let offset = offset as usize / 8;
        if let Some((size, signed)) = integer(ty) {
            fields.push(Field { name, offset, size, signed });
        } else if let Ok(array) = types::Array::try_from(ty.skip_mods_and_typedefs()) {
            match integer(array.contained_type()) {
                Some((1, _)) => texts.push(Text { name, offset, size: array.capacity() }),
                Some((size, signed)) if array.capacity() <= SHORT_ARRAY => {
                    fields.extend((0..array.capacity()).map(|i| Field {
                        name: format!("{name}_{i}"),
                        offset: offset + i * size,
                        size,
                        signed,
                    }));
                }
                _ => {}
            }
        }
    }
    Some(Layout { fields, texts, size: composite.size() })
}

/// The layout of the struct called `name`.
pub fn of_struct(btf: &Btf<'_>, name: &str) -> Option<Layout> {
    let ty: types::Struct<'_> = btf.type_by_name(name)?;
    of_type(btf, ty.type_id().into())
}

/// Where the `const volatile` globals of an object lie in its read-only data: (name, offset, size).
pub fn constants(btf: &Btf<'_>) -> Vec<(String, usize, usize)> {
    let Some(section): Option<types::DataSec<'_>> = btf.type_by_name(".rodata") else {
        return Vec::new();
    };
    section
        .iter()
        .filter_map(|var| {
            let ty: types::Var<'_> = btf.type_by_id(var.ty)?;
            let name = ty.name()?.to_string_lossy().into_owned();
            Some((name, var.offset as usize, var.size))
        })
        .collect()
}

/// How many arguments the running kernel hands to programs on the tracepoint `name`.
pub fn tracepoint_arguments(name: &str) -> Option<usize> {
    let btf = Btf::from_vmlinux().ok()?;
    let typedef: types::Typedef<'_> = btf.type_by_name(&format!("btf_trace_{name}"))?;
    let pointer = typedef.next_type()?;
    let proto = types::FuncProto::try_from(pointer.next_type()?).ok()?;
    proto.len().checked_sub(1) // the first is the tracepoint's own data
}

/// Key and value types of a map, as the object declares them.
pub fn of_map(btf: &Btf<'_>, map: &libbpf_rs::Map<'_>) -> (Layout, Layout) {
    let raw = map.as_libbpf_object().as_ptr();
    // SAFETY: the map belongs to a loaded object that outlives this call.
    let (key, value) = unsafe {
        (libbpf_sys::bpf_map__btf_key_type_id(raw), libbpf_sys::bpf_map__btf_value_type_id(raw))
    };
    (of_type(btf, key).unwrap_or_default(), of_type(btf, value).unwrap_or_default())
}
