//! Signals: the signals that end a process, and the message for a lost page of the region.

use std::io;

use rustix::event::Timespec;
use rustix::process::Signal;

use crate::command_line::write_within;

/// A dying process waits for no reader.
const AT_ONCE: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };

/// Returns the signals that end a process: SIGINT, SIGTERM, and SIGHUP unless it is ignored.
pub fn ending() -> Vec<i32> {
    let mut ending = vec![Signal::INT.as_raw(), Signal::TERM.as_raw()];
    let hangup = Signal::HUP.as_raw();
    if !is_ignored(hangup) {
        ending.push(hangup);
    }
    ending
}

/// Whether this process ignores a signal. Its parent can arrange that, as nohup does for SIGHUP.
pub fn is_ignored(signal: i32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.is_some_and(|mask| mask >> (signal - 1) & 1 == 1)
}

/// Installs a handler for SIGBUS that prints in one line why the program ends. The signal comes
/// when a page of a mapping is gone: another program truncated the region's file, or its device
/// failed.
///
/// Only for programs: a library must not change the signals of its process.
///
/// # Errors
/// The system's error.
#[allow(unsafe_code, reason = "a signal handler")]
pub fn explain_bus_errors(program: &str) -> io::Result<()> {
    let line = format!(
        "{program}: a page of the region is gone (SIGBUS): another program truncated its file, or \
         its device failed; start kv-server with another region_file and the last snapshot \
         (--restore)\n"
    );
    let explain = move || {
        write_within(line.as_bytes(), Some(&AT_ONCE));
        // Ends the process by the signal, as without a handler, so that its parent sees the signal.
        let _ = signal_hook::low_level::emulate_default_handler(Signal::BUS.as_raw());
    };
    // SAFETY: the handler is safe in a signal: it calls poll(2) and write(2) on memory that was
    // allocated before, and a function that is documented as safe there. It takes no lock,
    // allocates nothing and does not panic.
    unsafe { signal_hook::low_level::register(Signal::BUS.as_raw(), explain) }.map(drop)
}
