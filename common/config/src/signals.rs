//! Which signals end a process, which depends on how it was started.

use std::io;

use rustix::process::Signal;

/// SIGINT, SIGTERM, and SIGHUP unless it was ignored.
pub fn ending() -> Vec<i32> {
    let mut ending = vec![Signal::INT.as_raw(), Signal::TERM.as_raw()];
    let hangup = Signal::HUP.as_raw();
    if !is_ignored(hangup) {
        ending.push(hangup);
    }
    ending
}

/// Whether a signal is ignored because this process was started so, as by nohup.
pub fn is_ignored(signal: i32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.is_some_and(|mask| mask >> (signal - 1) & 1 == 1)
}

/// Has a program say in one line why it ends when a page of a mapping is gone (SIGBUS): another
/// program made the file behind a region shorter, or its device failed. For programs, which own
/// their signals; a library has no business with them.
///
/// # Errors
/// What the system says.
#[allow(unsafe_code, reason = "a signal handler")]
pub fn explain_bus_errors(program: &str) -> io::Result<()> {
    let line = format!(
        "{program}: a page of the region is gone (SIGBUS): its file was made shorter by another \
         program, or what it is on failed; start kv-server with another region_file and the last \
         snapshot (--restore)\n"
    );
    let explain = move || {
        // No reader is left when stderr is closed.
        let _ = rustix::io::write(rustix::stdio::stderr(), line.as_bytes());
        // As without a handler: a parent that waits sees the signal. Does not return.
        let _ = signal_hook::low_level::emulate_default_handler(Signal::BUS.as_raw());
    };
    // SAFETY: the handler only calls write(2), on memory allocated before, and what is documented
    // as safe in a signal handler. It takes no lock, allocates nothing and does not panic.
    unsafe { signal_hook::low_level::register(Signal::BUS.as_raw(), explain) }.map(drop)
}
