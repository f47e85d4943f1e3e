//! The machine that a result comes from, and the command that made it.

use std::fmt;
use std::fs;
use std::time::SystemTime;

use serde::{Deserialize, Serialize};

/// The facts that are needed to repeat a measurement.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Origin {
    /// The command line.
    pub command: String,
    /// The commit that the command was built from, with `-dirty` if something was not committed;
    /// null if the commit is not known.
    pub commit: Option<String>,
    /// The time at which the result was complete, in UTC.
    pub date: String,
    /// The machine that it was measured on.
    pub machine: Machine,
}

impl Origin {
    /// The origin of a result that this process, which runs the command of this name, completes
    /// now.
    pub fn of(command: &str, machine: Machine) -> Self {
        let words: Vec<_> =
            std::env::args_os().skip(1).map(|word| word.to_string_lossy().into_owned()).collect();
        let words = std::iter::once(command).chain(words.iter().map(String::as_str));
        Self {
            // Joining fails only for a NUL, and no argument has one.
            command: shlex::try_join(words).unwrap_or_default(),
            commit: option_env!("FARSIDE_COMMIT").map(str::to_owned),
            date: humantime::format_rfc3339_seconds(SystemTime::now()).to_string(),
            machine,
        }
    }
}

/// The machine, as far as it matters to the numbers.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Machine {
    pub(crate) processor: String,
    pub(crate) cores: usize,
    kernel: String,
    pages: String,
}

impl Machine {
    /// Detects this machine. `huge_percent` is the share of the region that has pages of 2 MiB.
    pub fn detect(huge_percent: u64) -> Self {
        let read = |path| fs::read_to_string(path).unwrap_or_default();
        let model = |line: &str| {
            Some(line.strip_prefix("model name")?.split_once(':')?.1.trim().to_owned())
        };
        let processor = read("/proc/cpuinfo").lines().find_map(model);
        Self {
            processor: processor.unwrap_or_else(|| std::env::consts::ARCH.to_owned()),
            cores: std::thread::available_parallelism().map_or(0, usize::from),
            kernel: read("/proc/sys/kernel/osrelease").trim().to_owned(),
            pages: format!("2 MiB pages ({huge_percent} %)"),
        }
    }
}

impl fmt::Display for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { processor, cores, kernel, pages } = self;
        write!(f, "{processor}, {cores} cores, Linux {kernel}, region in {pages}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_result_says_where_it_comes_from() {
        let Origin { command, date, machine, .. } = Origin::of("kv-bench", Machine::detect(50));
        assert!(command.starts_with("kv-bench"), "{command}");
        assert!(humantime::parse_rfc3339(&date).is_ok(), "{date}");
        assert!(
            machine.cores > 0 && machine.to_string().ends_with("region in 2 MiB pages (50 %)"),
            "{machine}"
        );
    }
}
