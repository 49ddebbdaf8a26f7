// SPDX-License-Identifier: Apache-2.0
//! Which mangled C++ names are sound: those of the Itanium C++ ABI that can be parsed without
//! backtracking.
//!
//! cpp_demangle tries the alternatives of a production in turn, and reads again what a failed one had
//! read: in names that are not well-formed the time doubles with each level (`SaISaISaI…`,
//! `XdldldldlE`). Here the next one or two bytes decide what follows, and each is read once, but for one thing (MAX_TRIED). What is
//! not well-formed, or has what is rare and ambiguous (new and delete expressions, `gs`, Java
//! resources), is refused: it is shown as it is in the file. The order of alternatives and what enters
//! the substitution table are cpp_demangle's. Each method reads the production of the ABI's grammar
//! that it is named after.

mod expressions;
mod types;

/// Levels of nested types, names and expressions. cpp_demangle, which counts each production, goes less
/// deep.
const MAX_DEPTH: u32 = 96;
/// Template arguments after a parameter in a conversion operator's type: the one thing that is read
/// twice.
const MAX_TRIED: u32 = 3;

/// None where what was read is refused.
type Read = Option<()>;

struct Reader<'a> {
    /// What is not read yet.
    rest: &'a [u8],
    /// Entries of the substitution table.
    substitutions: usize,
    depth: u32,
    /// In the type of a conversion operator.
    in_conversion: bool,
    /// How often something was read twice (MAX_TRIED).
    tried: u32,
}

/// Whether a name (`_Z…`, `__Z…`) is sound.
pub fn is_sound(name: &[u8]) -> bool {
    let rest = name.strip_prefix(b"_Z").or_else(|| name.strip_prefix(b"__Z"));
    rest.is_some_and(|rest| {
        let mut reader =
            Reader { rest, substitutions: 0, depth: 0, in_conversion: false, tried: 0 };
        reader.encoding().is_some() && matches!(reader.peek(), None | Some(b'.'))
    })
}

fn need(holds: bool) -> Read {
    holds.then_some(())
}

impl<'a> Reader<'a> {
    fn peek(&self) -> Option<u8> {
        self.rest.first().copied()
    }

    fn second(&self) -> Option<u8> {
        self.rest.get(1).copied()
    }

    /// Takes `text` if it comes next.
    fn take(&mut self, text: &[u8]) -> bool {
        let rest = self.rest.strip_prefix(text);
        self.rest = rest.unwrap_or(self.rest);
        rest.is_some()
    }

    fn expect(&mut self, text: &[u8]) -> Read {
        need(self.take(text))
    }

    /// Something that contains others of its kind.
    fn nested(&mut self, read: impl FnOnce(&mut Self) -> Read) -> Read {
        self.depth += 1;
        need(self.depth <= MAX_DEPTH)?;
        read(self)?;
        self.depth -= 1;
        Some(())
    }

    /// An entry of the substitution table more.
    fn add(&mut self) -> Read {
        self.substitutions += 1;
        Some(())
    }

    /// Reads up to an `E`, and the `E`.
    fn until_end(&mut self, mut read: impl FnMut(&mut Self) -> Read) -> Read {
        while !self.take(b"E") {
            read(self)?;
        }
        Some(())
    }

    fn number(&mut self) -> Option<usize> {
        let digits = self.rest.iter().take_while(|it| it.is_ascii_digit()).count();
        let (number, rest) = self.rest.split_at(digits);
        need(digits == 1 || (digits > 1 && digits < 10 && number[0] != b'0'))?;
        self.rest = rest;
        Some(number.iter().fold(0, |sum, it| sum * 10 + usize::from(it - b'0')))
    }

    /// [number] _
    fn counter(&mut self) -> Read {
        if self.peek()?.is_ascii_digit() {
            self.number()?;
        }
        self.expect(b"_")
    }

    fn signed(&mut self) -> Read {
        self.take(b"n");
        self.number().map(drop)
    }

    fn encoding(&mut self) -> Read {
        self.nested(|it| {
            if matches!(it.peek()?, b'T' | b'G') {
                return it.special();
            }
            it.name()?;
            it.types()
        })
    }

    /// Any number of types, to the end of the name, list or function type that they are in.
    fn types(&mut self) -> Read {
        loop {
            match (self.peek(), self.second()) {
                (None | Some(b'E' | b'.'), _) | (Some(b'R' | b'O'), Some(b'E')) => return Some(()),
                _ => self.ty()?,
            }
        }
    }

    fn special(&mut self) -> Read {
        let (head, rest) = self.rest.split_first_chunk::<2>()?;
        match head {
            b"Th" | b"Tv" => self.rest = &self.rest[1..],
            _ => self.rest = rest,
        }
        match head {
            b"TV" | b"TT" | b"TI" | b"TS" | b"TF" => self.ty(),
            b"TH" | b"TW" | b"GV" => self.name(),
            b"Tc" => {
                self.call_offset()?;
                self.call_offset()?;
                self.encoding()
            }
            b"Th" | b"Tv" => {
                self.call_offset()?;
                self.encoding()
            }
            b"TC" => {
                self.ty()?;
                self.number()?;
                self.expect(b"_")?;
                self.ty()
            }
            b"GR" => {
                self.name()?;
                self.sequence_number().map(drop)
            }
            b"GT" => {
                self.rest = self.rest.get(1..)?;
                self.encoding()
            }
            _ => None,
        }
    }

    fn call_offset(&mut self) -> Read {
        let is_virtual = self.take(b"v");
        need(is_virtual || self.take(b"h"))?;
        self.signed()?;
        self.expect(b"_")?;
        if is_virtual {
            self.signed()?;
            self.expect(b"_")?;
        }
        Some(())
    }

    fn name(&mut self) -> Read {
        self.nested(|it| match it.peek()? {
            b'N' => it.nested_name(),
            b'Z' => it.local_name(),
            b'S' if it.second() != Some(b't') => {
                it.substitution()?;
                it.template_arguments()
            }
            _ => {
                it.take(b"St");
                it.unqualified_name()?;
                if it.peek() == Some(b'I') {
                    it.add()?;
                    it.template_arguments()?;
                }
                Some(())
            }
        })
    }

    fn local_name(&mut self) -> Read {
        self.expect(b"Z")?;
        self.encoding()?;
        self.expect(b"E")?;
        if self.take(b"s") {
            return self.discriminator();
        }
        if self.take(b"d") {
            if self.peek()? != b'_' {
                self.signed()?;
            }
            self.expect(b"_")?;
            return self.name();
        }
        self.name()?;
        self.discriminator()
    }

    /// A discriminator, or none.
    fn discriminator(&mut self) -> Read {
        match (self.peek(), self.second()) {
            (Some(b'_'), Some(b'_')) => {
                self.rest = &self.rest[2..];
                need(self.number()? >= 10)?;
                self.expect(b"_")
            }
            (Some(b'_'), Some(b'0'..=b'9')) => {
                self.rest = &self.rest[2..];
                Some(())
            }
            _ => Some(()),
        }
    }

    fn qualifiers(&mut self) -> bool {
        let before = self.rest.len();
        for letter in [b"r", b"V", b"K"] {
            self.take(letter);
        }
        self.rest.len() < before
    }

    fn nested_name(&mut self) -> Read {
        self.expect(b"N")?;
        if !self.take(b"H") {
            self.qualifiers();
            let _ = self.take(b"R") || self.take(b"O");
        }
        let (mut is_some, mut is_template_prefix, mut is_whole) = (false, false, false);
        while !self.take(b"E") {
            let (first, second) = (self.peek()?, self.second());
            let is_name = match (first, second) {
                (b'S', _) => {
                    self.substitution()?;
                    (is_some, is_template_prefix, is_whole) = (true, true, false);
                    continue;
                }
                (b'T', _) => {
                    self.template_parameter()?;
                    false
                }
                (b'D', Some(b't' | b'T')) => {
                    self.decltype()?;
                    false
                }
                (b'I', _) => {
                    need(is_some && is_template_prefix)?;
                    self.template_arguments()?;
                    true
                }
                _ => {
                    self.unqualified_name()?;
                    let is_member = self.peek() == Some(b'M');
                    need(!is_member || !is_some || matches!(first, b'0'..=b'9' | b'L'))?;
                    !is_member
                }
            };
            is_template_prefix = self.peek() != Some(b'E');
            (is_some, is_whole) = (true, is_name);
            if is_template_prefix {
                self.add()?;
            }
            if !matches!((first, second), (b'I' | b'T', _) | (b'D', Some(b't' | b'T'))) {
                self.take(b"M");
            }
        }
        need(is_whole)
    }

    fn source_name(&mut self) -> Read {
        let length = self.number().filter(|&it| it > 0 && it <= self.rest.len())?;
        let (name, rest) = self.rest.split_at(length);
        self.rest = rest;
        need(name.iter().all(|it| it.is_ascii_alphanumeric() || b"$_.".contains(it)))
    }

    fn unqualified_name(&mut self) -> Read {
        match self.peek()? {
            b'0'..=b'9' => self.source_name()?,
            b'L' => {
                self.expect(b"L")?;
                self.source_name()?;
                self.discriminator()?;
            }
            b'C' => {
                self.expect(b"C")?;
                let is_inherited = self.take(b"I");
                self.one_of(b"1234")?;
                if is_inherited {
                    self.ty()?;
                }
            }
            b'D' => {
                self.expect(b"D")?;
                self.one_of(b"0124")?;
            }
            b'U' if self.take(b"Ut") => self.counter()?,
            b'U' => self.closure()?,
            _ => {
                self.take(b"on");
                self.operator_name()?;
            }
        }
        while self.take(b"B") {
            self.source_name()?;
        }
        Some(())
    }

    fn one_of(&mut self, letters: &[u8]) -> Read {
        let (first, rest) = self.rest.split_first()?;
        self.rest = rest;
        need(letters.contains(first))
    }

    fn closure(&mut self) -> Read {
        self.expect(b"Ul")?;
        if !self.take(b"v") {
            need(self.peek()? != b'E')?;
            self.types()?;
        }
        self.expect(b"E")?;
        self.counter()
    }

    fn template_arguments(&mut self) -> Read {
        self.expect(b"I")?;
        self.template_argument()?;
        self.until_end(Self::template_argument)
    }

    fn template_argument(&mut self) -> Read {
        self.nested(|it| match it.peek()? {
            b'X' => {
                it.expect(b"X")?;
                it.expression()?;
                it.expect(b"E")
            }
            b'L' => it.literal(),
            b'J' | b'I' => {
                it.rest = &it.rest[1..];
                it.until_end(Self::template_argument)
            }
            _ => it.ty(),
        })
    }

    fn literal(&mut self) -> Read {
        self.expect(b"L")?;
        if self.take(b"_Z") {
            self.encoding()?;
            return self.expect(b"E");
        }
        self.ty()?;
        let end = self.rest.iter().position(|&it| it == b'E')?;
        self.rest = &self.rest[end + 1..];
        Some(())
    }

    /// [digits of base 36] _: 0 without digits, else their value + 1.
    fn sequence_number(&mut self) -> Option<usize> {
        let is_digit = |it: &&u8| it.is_ascii_digit() || it.is_ascii_uppercase();
        let digits = self.rest.iter().take_while(is_digit).count();
        let (number, rest) = self.rest.split_at(digits);
        self.rest = rest;
        self.expect(b"_")?;
        need(digits < 2 || (digits < 6 && number[0] != b'0'))?;
        let value = |it: u8| usize::from(if it <= b'9' { it - b'0' } else { it - b'A' + 10 });
        let number = number.iter().fold(0, |sum, &it| sum * 36 + value(it));
        Some(number + usize::from(digits > 0))
    }

    fn substitution(&mut self) -> Read {
        self.expect(b"S")?;
        if matches!(self.peek()?, b't' | b'a' | b'b' | b's' | b'i' | b'o' | b'd') {
            self.rest = &self.rest[1..];
            return Some(());
        }
        need(self.sequence_number()? < self.substitutions)
    }

    fn template_parameter(&mut self) -> Read {
        self.expect(b"T")?;
        self.counter()
    }
}
