// SPDX-License-Identifier: Apache-2.0
//! Types of mangled C++ names.
use super::{need, Read, Reader, MAX_TRIED};

impl Reader<'_> {
    pub(super) fn decltype(&mut self) -> Read {
        self.nested(|it| {
            it.expect(b"D")?;
            it.one_of(b"tT")?;
            it.expression()?;
            it.expect(b"E")
        })
    }

    pub(super) fn ty(&mut self) -> Read {
        self.nested(Self::any_type)
    }

    pub(super) fn any_type(&mut self) -> Read {
        let (first, second) = (self.peek()?, self.second());
        match first {
            b'v' | b'w' | b'b' | b'c' | b'a' | b'h' | b's' | b't' | b'i' | b'j' | b'l' | b'm'
            | b'x' | b'y' | b'n' | b'o' | b'f' | b'd' | b'e' | b'g' | b'z' => {
                self.rest = &self.rest[1..];
                return Some(());
            }
            b'u' => {
                self.expect(b"u")?;
                return self.source_name();
            }
            b'U' => {
                self.expect(b"U")?;
                self.source_name()?;
                if self.peek() == Some(b'I') {
                    self.template_arguments()?;
                }
                self.ty()?;
            }
            b'r' | b'V' | b'K' => {
                self.qualifiers();
                if self.is_function() { self.function() } else { self.ty() }?;
            }
            b'P' | b'R' | b'O' | b'G' => {
                self.rest = &self.rest[1..];
                self.ty()?;
            }
            b'C' => {
                need(!matches!(second?, b'1'..=b'4' | b'I'))?;
                self.expect(b"C")?;
                self.ty()?;
            }
            b'M' => {
                self.expect(b"M")?;
                self.ty()?;
                self.ty()?;
            }
            b'A' => {
                self.expect(b"A")?;
                self.dimension()?;
                self.ty()?;
            }
            b'F' => self.function()?,
            b'S' if second? != b't' => {
                self.substitution()?;
                if self.peek() != Some(b'I') {
                    return Some(());
                }
                self.template_arguments()?;
            }
            b'N' | b'Z' | b'S' | b'L' | b'0'..=b'9' => self.name()?,
            b'T' if matches!(second?, b's' | b'u' | b'e') => {
                self.rest = &self.rest[2..];
                self.name()?;
            }
            b'T' => self.parameter_type()?,
            b'D' => return self.type_with_d(),
            _ => return None,
        }
        self.add()
    }

    /// The dimension of an array or vector, with the `_` behind it.
    pub(super) fn dimension(&mut self) -> Read {
        match self.peek()? {
            b'_' => {}
            b'0'..=b'9' => drop(self.number()?),
            _ => self.expression()?,
        }
        self.expect(b"_")
    }

    pub(super) fn parameter_type(&mut self) -> Read {
        self.template_parameter()?;
        if self.peek() != Some(b'I') {
            return Some(());
        }
        if self.in_conversion {
            // As cpp_demangle has it: arguments belong to the parameter only where others follow them.
            self.tried += 1;
            need(self.tried <= MAX_TRIED)?;
            let before = (self.rest, self.substitutions);
            self.template_arguments()?;
            let has_more = self.peek() == Some(b'I');
            (self.rest, self.substitutions) = before;
            if !has_more {
                return Some(());
            }
        }
        self.add()?;
        self.template_arguments()
    }

    pub(super) fn type_with_d(&mut self) -> Read {
        match self.second()? {
            b'd' | b'e' | b'f' | b'h' | b'i' | b's' | b'u' | b'a' | b'c' | b'n' => {
                self.rest = &self.rest[2..];
                return Some(());
            }
            b'F' | b'B' | b'U' => {
                if !self.take(b"DF16b") {
                    let is_float = self.second() == Some(b'F');
                    self.rest = &self.rest[2..];
                    self.number()?;
                    need(self.take(b"_") || (is_float && self.take(b"x")))?;
                }
                return Some(());
            }
            b't' | b'T' => self.decltype()?,
            b'p' => {
                self.expect(b"Dp")?;
                self.ty()?;
            }
            b'v' => {
                self.expect(b"Dv")?;
                need(self.peek()? != b'_')?;
                self.dimension()?;
                self.ty()?;
            }
            _ => self.function()?,
        }
        self.add()
    }

    pub(super) fn is_function(&self) -> bool {
        match self.peek() {
            Some(b'D') => matches!(self.second(), Some(b'o' | b'O' | b'x' | b'w')),
            first => first == Some(b'F'),
        }
    }

    pub(super) fn function(&mut self) -> Read {
        if self.take(b"DO") {
            self.expression()?;
            self.expect(b"E")?;
        } else {
            self.take(b"Do");
        }
        self.take(b"Dx");
        self.expect(b"F")?;
        self.take(b"Y");
        need(self.peek()? != b'E')?;
        self.types()?;
        let _ = self.take(b"R") || self.take(b"O");
        self.expect(b"E")
    }
}
