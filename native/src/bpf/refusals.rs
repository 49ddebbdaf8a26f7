// SPDX-License-Identifier: Apache-2.0
//! What libbpf logs where the kernel refuses an object: which program, and the verifier's reason.
use std::cell::RefCell;

use libbpf_rs::PrintLevel;
use pyo3::exceptions::PyOSError;
use pyo3::PyErr;

const LOG_BEGINS: &str = "-- BEGIN PROG LOAD LOG --";
const LOG_ENDS: &str = "-- END PROG LOAD LOG --";
const LOAD_FAILED: &str = ": BPF program load failed";

/// A program that the kernel refused.
#[derive(Clone, Debug, PartialEq)]
pub struct Refused {
    pub program: String,
    /// The last line of the verifier's log; empty where there is no log.
    pub reason: String,
}

thread_local! {
    static LAST: RefCell<Option<Refused>> = const { RefCell::new(None) };
}

/// Has libbpf's messages kept, where they are about a refused program, and not printed.
pub fn listen() {
    libbpf_rs::set_print(Some((PrintLevel::Warn, |_, message| on_message(&message))));
}

/// The program refused since the last call, on this thread.
pub fn take() -> Option<Refused> {
    LAST.with(|last| last.borrow_mut().take())
}

/// Why an object could not be loaded. Where the verifier rejects a program: EINVAL with its reason,
/// whatever number the kernel gave (EACCES would look like a lack of privileges).
pub fn error(object: &str, error: &libbpf_rs::Error) -> PyErr {
    let what = format!("cannot load BPF object {object}");
    match take() {
        Some(refused) if !refused.reason.is_empty() => {
            let text = format!("{what}: program {}: {}", refused.program, refused.reason);
            PyOSError::new_err((libc::EINVAL, text))
        }
        _ => super::os_error(&what, error),
    }
}

fn on_message(message: &str) {
    let Some((_, rest)) = message.split_once("prog '") else { return };
    let Some((program, rest)) = rest.split_once('\'') else { return };
    let reason = match rest.split_once(LOG_BEGINS) {
        Some((_, log)) => reason_in(log),
        None if rest.starts_with(LOAD_FAILED) => "",
        None => return,
    };
    let refused = Refused { program: program.into(), reason: reason.into() };
    LAST.with(|last| *last.borrow_mut() = Some(refused));
}

/// The last line of a verifier's log before its statistics.
fn reason_in(log: &str) -> &str {
    let log = log.split_once(LOG_ENDS).map_or(log, |(log, _)| log);
    log.lines()
        .rev()
        .map(str::trim)
        .find(|line| {
            let is_statistics = ["processed ", "verification time", "stack depth", "libbpf:"];
            !line.is_empty() && !is_statistics.iter().any(|start| line.starts_with(start))
        })
        .unwrap_or("")
}
