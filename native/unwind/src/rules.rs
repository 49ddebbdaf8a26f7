// SPDX-License-Identifier: Apache-2.0
//! How to go from a frame to its caller: the few forms that compilers really emit for x86-64, 16 bytes
//! each, as the kernel's programs read them (`struct unwind_rule` of abi/unwind.h;
//! bpf/unwind_native.h).
use gimli::{CallFrameInstruction, Register, UnwindExpression};

type Instruction = CallFrameInstruction<usize>;

/// DWARF's numbers of registers.
pub const RBP: u16 = 6;
pub const RSP: u16 = 7;
const RIP: u16 = 16;

/// Where the canonical frame address (CFA: rsp before the call) comes from. Order as in
/// `enum unwind_cfa`.
#[repr(u8)]
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Cfa {
    /// No row covers the code.
    #[default]
    None,
    /// The thread's entry: nothing called it.
    End,
    /// rsp + offset
    Rsp,
    /// rbp + offset; `extra`: it may lie on another stack, below this one
    Rbp,
    /// Another register + offset; known in the first frame only.
    Register,
    /// rsp + offset, and 8 more from byte `extra` on of a 16-byte entry.
    Plt,
    /// *(rsp + offset) + extra
    RspDeref,
    /// *(rbp + offset) + extra
    RbpDeref,
    /// A signal's frame: rsp is at rsp + offset, rip at rsp + extra, rbp at rsp + rbp_offset.
    Signal,
    /// A form that we do not read.
    Unsupported,
    /// Left for the frame of an exception's handler: rsp is at rbp + offset, rip at rbp + extra, a
    /// pointer to rbp at rbp + rbp_offset (0: rbp is at rbp). With a register: it is the address of
    /// rip, and rsp is it + offset; where offset is 0, rsp stays, and rip is the register, or with
    /// `extra` at register + extra.
    Handler,
    /// Go's system stack of a thread, to a goroutine that has left its stack: `g` is at the thread's
    /// base + offset, `m` at g + register, the goroutine at m + (extra >> 16), which has its rsp at
    /// (extra & 0xffff), rip behind that, rbp at rbp_offset. Without a goroutine, the stack begins
    /// here. With `AtCfa` rip is not that one, but the return address at rsp.
    Goroutine,
    /// Generated code without a rule (yet): user space is asked for one, meanwhile the frame pointer is
    /// used.
    Generated,
    /// A frame of HotSpot's interpreter: rip is at rbp + 8, rsp at rbp - 8, rbp at rbp.
    Interpreted,
    /// A frame of code that V8 has compiled: by the frame pointer, and it has a function.
    V8,
    /// rsp + offset, in generated code that runs frames as an evaluation loop would (PHP, Ruby).
    Loop,
}

impl Cfa {
    /// The form of a number; None where generated code cannot have it.
    pub fn of_generated(number: u8) -> Option<Self> {
        [Self::Rsp, Self::Rbp, Self::Generated, Self::Interpreted, Self::V8, Self::Loop]
            .into_iter()
            .find(|&it| it as u8 == number)
    }
}

/// Where the caller's rbp is. Order as in `enum unwind_rbp`.
#[allow(clippy::enum_variant_names)]
#[repr(u8)]
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Rbp {
    #[default]
    Unchanged,
    /// At CFA + offset.
    AtCfa,
    /// At rbp + offset.
    AtRbp,
    /// Gone; the caller's is not known.
    Unknown,
}

/// `offset`, `extra` and `register` as `Cfa` has them.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Rule {
    pub cfa: Cfa,
    pub rbp: Rbp,
    /// DWARF's number.
    pub register: u16,
    pub offset: i32,
    pub rbp_offset: i32,
    pub extra: i32,
}

impl Rule {
    pub const BYTES: usize = 16;
    pub const NONE: Self = Self {
        cfa: Cfa::None,
        rbp: Rbp::Unchanged,
        register: 0,
        offset: 0,
        rbp_offset: 0,
        extra: 0,
    };

    pub fn encode(&self) -> [u8; Self::BYTES] {
        let mut out = [0; Self::BYTES];
        out[0] = self.cfa as u8;
        out[1] = self.rbp as u8;
        out[2..4].copy_from_slice(&self.register.to_le_bytes());
        out[4..8].copy_from_slice(&self.offset.to_le_bytes());
        out[8..12].copy_from_slice(&self.rbp_offset.to_le_bytes());
        out[12..16].copy_from_slice(&self.extra.to_le_bytes());
        out
    }
}

/// Where the return address is, by the CFI.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
enum ReturnAddress {
    /// At CFA - 8, where `call` puts it.
    #[default]
    Pushed,
    Undefined,
    /// At rsp + offset (signal frames).
    AtRsp(i32),
    /// In a register (vfork, whose child must not find it overwritten on the stack).
    In(u16),
    Unsupported,
}

/// The rules of the registers that matter, at one place of a function.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct State {
    cfa: Cfa,
    register: u16,
    offset: i64,
    extra: i64,
    rbp: Rbp,
    rbp_offset: i64,
    /// rbp stands at rsp + offset (signal frames).
    rbp_at_rsp: bool,
    return_address: ReturnAddress,
}

impl State {
    pub fn rule(&self) -> Rule {
        let fits = |value: i64| i32::try_from(value).is_ok();
        let mut rule = Rule {
            cfa: self.cfa,
            rbp: self.rbp,
            register: if self.cfa == Cfa::Register { self.register } else { 0 },
            offset: self.offset as i32,
            rbp_offset: self.rbp_offset as i32,
            extra: self.extra as i32,
        };
        match self.return_address {
            ReturnAddress::Undefined => return Rule { cfa: Cfa::End, ..Rule::NONE },
            ReturnAddress::AtRsp(offset) if self.cfa == Cfa::RspDeref && self.rbp_at_rsp => {
                rule.cfa = Cfa::Signal;
                rule.rbp = Rbp::Unchanged;
                rule.extra = offset;
                return rule;
            }
            // Has the form of `Handler`: rip is in a register, and rsp stays.
            ReturnAddress::In(register) if self.cfa == Cfa::Rsp && self.offset == 0 => {
                return Rule { cfa: Cfa::Handler, register, ..Rule::NONE };
            }
            ReturnAddress::Pushed if !self.rbp_at_rsp => {}
            _ => rule.cfa = Cfa::Unsupported,
        }
        if !(fits(self.offset) && fits(self.rbp_offset) && fits(self.extra)) {
            rule.cfa = Cfa::Unsupported;
        }
        if rule.cfa == Cfa::Unsupported {
            return Rule { cfa: Cfa::Unsupported, ..Rule::NONE };
        }
        rule
    }

    fn set_cfa(&mut self, register: Register, offset: i64) {
        self.cfa = match register.0 {
            RSP => Cfa::Rsp,
            RBP => Cfa::Rbp,
            _ => Cfa::Register,
        };
        self.register = register.0;
        self.offset = offset;
        self.extra = 0;
    }

    fn set_cfa_expression(&mut self, expression: &[u8]) {
        match Expression::read(expression) {
            Some(Expression::Deref { register: RSP, offset, extra }) => {
                (self.cfa, self.offset, self.extra) = (Cfa::RspDeref, offset, extra);
            }
            Some(Expression::Deref { register: RBP, offset, extra }) => {
                (self.cfa, self.offset, self.extra) = (Cfa::RbpDeref, offset, extra);
            }
            Some(Expression::Plt { offset, from }) => {
                (self.cfa, self.offset, self.extra) = (Cfa::Plt, offset, from);
            }
            Some(Expression::Plain { register, offset }) => {
                self.set_cfa(Register(register), offset);
            }
            _ => self.cfa = Cfa::Unsupported,
        }
    }

    /// `at`: the rule is "saved at the CFA + offset".
    fn set_saved(&mut self, register: Register, at: i64) {
        match register.0 {
            RBP => (self.rbp, self.rbp_offset, self.rbp_at_rsp) = (Rbp::AtCfa, at, false),
            RIP if at == -8 => self.return_address = ReturnAddress::Pushed,
            RIP => self.return_address = ReturnAddress::Unsupported,
            _ => {}
        }
    }

    fn set_expression(&mut self, register: Register, expression: &[u8]) {
        let place = match Expression::read(expression) {
            Some(Expression::Plain { register, offset }) => Some((register, offset)),
            _ => None,
        };
        match (register.0, place) {
            (RBP, Some((RBP, offset))) => {
                (self.rbp, self.rbp_offset, self.rbp_at_rsp) = (Rbp::AtRbp, offset, false);
            }
            (RBP, Some((RSP, offset))) => (self.rbp_offset, self.rbp_at_rsp) = (offset, true),
            (RBP, _) => (self.rbp, self.rbp_at_rsp) = (Rbp::Unknown, false),
            (RIP, Some((RSP, offset))) => {
                self.return_address = ReturnAddress::AtRsp(offset as i32);
            }
            (RIP, _) => self.return_address = ReturnAddress::Unsupported,
            _ => {}
        }
    }
}

/// The shapes of DWARF expressions met in unwind data.
enum Expression {
    /// breg N, offset
    Plain { register: u16, offset: i64 },
    /// breg N, offset; deref; [plus_uconst extra]
    Deref { register: u16, offset: i64, extra: i64 },
    /// What binutils and lld write for .plt: rsp + 8 + ((rip & 15) >= from) << 3.
    Plt { offset: i64, from: i64 },
}

impl Expression {
    fn read(bytes: &[u8]) -> Option<Self> {
        const DEREF: u8 = 0x06;
        const PLUS_UCONST: u8 = 0x23;
        let (&first, rest) = bytes.split_first()?;
        let register = u16::from(first.checked_sub(0x70).filter(|&n| n < 32)?);
        let (offset, rest) = sleb(rest)?;
        match rest {
            [] => Some(Self::Plain { register, offset }),
            [DEREF] => Some(Self::Deref { register, offset, extra: 0 }),
            [DEREF, PLUS_UCONST, rest @ ..] => {
                let (extra, rest) = uleb(rest)?;
                rest.is_empty().then_some(Self::Deref { register, offset, extra })
            }
            // breg16 0; lit15; and; lit N; ge; lit3; shl; plus
            [0x80, 0x00, 0x3f, 0x1a, lit @ 0x30..=0x4f, 0x2a, 0x33, 0x24, 0x22]
                if register == RSP =>
            {
                Some(Self::Plt { offset, from: i64::from(lit - 0x30) })
            }
            _ => None,
        }
    }
}

fn uleb(bytes: &[u8]) -> Option<(i64, &[u8])> {
    let mut value = 0i64;
    for (i, &byte) in bytes.iter().enumerate().take(9) {
        value |= i64::from(byte & 0x7f) << (7 * i);
        if byte & 0x80 == 0 {
            return Some((value, &bytes[i + 1..]));
        }
    }
    None
}

fn sleb(bytes: &[u8]) -> Option<(i64, &[u8])> {
    let (value, rest) = uleb(bytes)?;
    let bits = 7 * (bytes.len() - rest.len()) as u32;
    Some((value << (64 - bits) >> (64 - bits), rest))
}

/// Runs call frame instructions and reports where the rule changes.
pub struct Evaluator<'a> {
    /// Alignment factors of the CIE.
    pub code_factor: u64,
    pub data_factor: i64,
    /// What the CIE's instructions lead to.
    pub initial: State,
    pub state: State,
    /// By DW_CFA_remember_state; 64 at most.
    pub remembered: Vec<State>,
    /// The section, which expressions are read out of.
    pub section: &'a [u8],
}

fn bytes_of<'a>(section: &'a [u8], it: &UnwindExpression<usize>) -> gimli::Result<&'a [u8]> {
    let end = it.offset.saturating_add(it.length);
    section.get(it.offset..end).ok_or(gimli::Error::OffsetOutOfBounds(it.offset as u64))
}

/// What one instruction did.
pub enum Step {
    /// The rows from here on are for code this much further on.
    Advance(u64),
    /// The rows from here on are for code at this address.
    Goto(u64),
    Same,
}

impl Evaluator<'_> {
    pub fn run(&mut self, instruction: Instruction) -> gimli::Result<Step> {
        use CallFrameInstruction as I;
        let factored = |offset: i64| offset.wrapping_mul(self.data_factor);
        let state = &mut self.state;
        match instruction {
            I::SetLoc { address } => return Ok(Step::Goto(address)),
            I::AdvanceLoc { delta } => {
                return Ok(Step::Advance(u64::from(delta).wrapping_mul(self.code_factor)));
            }
            I::DefCfa { register, offset } => state.set_cfa(register, offset as i64),
            I::DefCfaSf { register, factored_offset } => {
                state.set_cfa(register, factored(factored_offset));
            }
            I::DefCfaRegister { register } => state.set_cfa(register, state.offset),
            I::DefCfaOffset { offset } => state.offset = offset as i64,
            I::DefCfaOffsetSf { factored_offset } => state.offset = factored(factored_offset),
            I::DefCfaExpression { expression } => {
                state.set_cfa_expression(bytes_of(self.section, &expression)?);
            }
            I::Offset { register, factored_offset } => {
                state.set_saved(register, factored(factored_offset as i64));
            }
            I::OffsetExtendedSf { register, factored_offset } => {
                state.set_saved(register, factored(factored_offset));
            }
            I::Expression { register, expression } => {
                state.set_expression(register, bytes_of(self.section, &expression)?);
            }
            I::Undefined { register: Register(RIP) } => {
                state.return_address = ReturnAddress::Undefined;
            }
            I::SameValue { register: Register(RBP) } => {
                (state.rbp, state.rbp_at_rsp) = (Rbp::Unchanged, false);
            }
            I::Undefined { register: Register(RBP) }
            | I::ValOffset { register: Register(RBP), .. }
            | I::ValOffsetSf { register: Register(RBP), .. }
            | I::ValExpression { register: Register(RBP), .. }
            | I::Register { dest_register: Register(RBP), .. } => {
                (state.rbp, state.rbp_at_rsp) = (Rbp::Unknown, false);
            }
            I::ValOffset { register: Register(RIP), .. }
            | I::ValOffsetSf { register: Register(RIP), .. }
            | I::ValExpression { register: Register(RIP), .. }
            | I::SameValue { register: Register(RIP) } => {
                state.return_address = ReturnAddress::Unsupported;
            }
            I::Register { dest_register: Register(RIP), src_register } => {
                state.return_address = ReturnAddress::In(src_register.0);
            }
            I::Restore { register: Register(RBP) } => {
                state.rbp = self.initial.rbp;
                state.rbp_offset = self.initial.rbp_offset;
                state.rbp_at_rsp = self.initial.rbp_at_rsp;
            }
            I::Restore { register: Register(RIP) } => {
                state.return_address = self.initial.return_address;
            }
            I::RememberState if self.remembered.len() < 64 => self.remembered.push(*state),
            I::RestoreState => {
                if let Some(remembered) = self.remembered.pop() {
                    *state = remembered;
                }
            }
            _ => {}
        }
        Ok(Step::Same)
    }
}
