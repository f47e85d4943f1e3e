//! Which signals end a process, which depends on how it was started.

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

/// Whether who started this process had a signal ignored, as nohup has SIGHUP.
pub fn is_ignored(signal: i32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.is_some_and(|mask| mask >> (signal - 1) & 1 == 1)
}
