// SPDX-License-Identifier: Apache-2.0
//! Expressions of mangled C++ names, and the operators that they share with functions.
use super::{need, Read, Reader};

/// Operators (two letters each), by their number of operands.
const UNARY: &[u8] = b"psngaddecontppmm";
const BINARY: &[u8] = b"plmimldvrmanoreoaSpLmImLdVrMaNoReOlsrslSrSeqneltgtlegeaaoocmpmptclixss";
const TERNARY: &[u8] = b"qu";
/// new, new[], delete, delete[]: in names alone; as expressions they are ambiguous.
const ALLOCATIONS: &[u8] = b"nwnadlda";

impl Reader<'_> {
    /// Reads one of these operators, if it comes next.
    pub(super) fn take_one(&mut self, operators: &[u8]) -> bool {
        operators.chunks(2).any(|code| self.take(code))
    }

    /// Reads an operator, if it comes next. Returns the number of its operands, 0 where none does.
    pub(super) fn simple_operator(&mut self) -> u8 {
        match () {
            () if self.take_one(UNARY) => 1,
            () if self.take_one(BINARY) => 2,
            () if self.take_one(TERNARY) => 3,
            () => 0,
        }
    }

    pub(super) fn operator_name(&mut self) -> Read {
        if self.simple_operator() > 0 || self.take_one(ALLOCATIONS) {
            return Some(());
        }
        if self.take(b"cv") {
            let before = std::mem::replace(&mut self.in_conversion, true);
            self.ty()?;
            self.in_conversion = before;
            return Some(());
        }
        if !self.take(b"li") {
            self.expect(b"v")?;
            self.one_of(b"0123456789")?;
        }
        self.source_name()
    }

    pub(super) fn expression(&mut self) -> Read {
        self.nested(Self::any_expression)
    }

    pub(super) fn expressions(&mut self, count: u8) -> Read {
        (0..count).try_for_each(|_| self.expression())
    }

    pub(super) fn any_expression(&mut self) -> Read {
        if self.take(b"pp_") || self.take(b"mm_") {
            return self.expression();
        }
        match self.peek()? {
            b'T' => return self.template_parameter(),
            b'L' => return self.literal(),
            b'0'..=b'9' => return self.simple_id(),
            _ => {}
        }
        let (head, rest) = self.rest.split_first_chunk::<2>()?;
        if matches!(head, b"fp") || (head == b"fL" && rest.first()?.is_ascii_digit()) {
            return self.function_parameter();
        }
        let before = std::mem::replace(&mut self.rest, rest);
        match head {
            b"cl" => {
                self.expression()?;
                self.until_end(Self::expression)
            }
            b"cv" => {
                self.ty()?;
                match self.take(b"_") {
                    true => self.until_end(Self::expression),
                    false => self.expression(),
                }
            }
            b"tl" => {
                self.ty()?;
                self.until_end(Self::expression)
            }
            b"il" => self.until_end(Self::expression),
            b"dc" | b"sc" | b"cc" | b"rc" => {
                self.ty()?;
                self.expression()
            }
            b"ti" | b"st" | b"at" => self.ty(),
            b"te" | b"sz" | b"az" | b"nx" | b"sp" | b"tw" => self.expression(),
            b"dt" | b"pt" => {
                self.expression()?;
                self.unqualified_name()?;
                if self.peek() == Some(b'I') {
                    self.template_arguments()?;
                }
                Some(())
            }
            b"ds" => self.expressions(2),
            b"sZ" if self.peek()? == b'T' => self.template_parameter(),
            b"sZ" => self.function_parameter(),
            b"sP" => self.until_end(Self::template_argument),
            b"fl" | b"fr" | b"fL" | b"fR" => {
                need(self.simple_operator() == 2)?;
                self.expressions(1 + u8::from(head[1].is_ascii_uppercase()))
            }
            b"tr" => Some(()),
            b"sr" => self.scoped_name(),
            b"on" | b"dn" => {
                self.rest = before;
                self.base_name()
            }
            _ => {
                self.rest = before;
                let operands = self.simple_operator();
                need(operands > 0)?;
                self.expressions(operands)
            }
        }
    }

    pub(super) fn function_parameter(&mut self) -> Read {
        self.expect(b"f")?;
        if self.take(b"L") {
            self.number()?;
        }
        self.expect(b"p")?;
        self.qualifiers();
        if self.take(b"T") {
            Some(())
        } else {
            self.counter()
        }
    }

    /// What follows `sr`.
    pub(super) fn scoped_name(&mut self) -> Read {
        let is_nested = self.take(b"N");
        let has_type = is_nested || !self.peek()?.is_ascii_digit();
        if has_type {
            self.unresolved_type()?;
        }
        if is_nested || !has_type {
            self.simple_id()?;
            self.until_end(Self::simple_id)?;
        }
        self.base_name()
    }

    pub(super) fn unresolved_type(&mut self) -> Read {
        match self.peek()? {
            b'T' => {
                self.template_parameter()?;
                if self.peek() == Some(b'I') {
                    self.template_arguments()?;
                }
            }
            b'D' => self.decltype()?,
            _ => return self.substitution(),
        }
        self.add()
    }

    pub(super) fn base_name(&mut self) -> Read {
        if self.take(b"on") {
            self.operator_name()?;
            if self.peek() == Some(b'I') {
                self.template_arguments()?;
            }
            return Some(());
        }
        if self.take(b"dn") && !self.peek()?.is_ascii_digit() {
            return self.unresolved_type();
        }
        self.simple_id()
    }

    pub(super) fn simple_id(&mut self) -> Read {
        self.source_name()?;
        if self.peek() == Some(b'I') {
            self.template_arguments()?;
        }
        Some(())
    }
}
