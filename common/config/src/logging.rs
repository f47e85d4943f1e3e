//! Log lines: their format, their least severity, and where they go.

use std::str::FromStr;

use serde::Deserialize;

use crate::{ConfigError, bad_value};

#[cfg(feature = "commands")]
pub use subscriber::{report, start};

#[cfg(feature = "commands")]
pub use crate::log_lines::Log;

/// The format of log lines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// For people.
    #[default]
    Human,
    /// One JSON object on each line.
    Json,
}

impl FromStr for LogFormat {
    type Err = ConfigError;

    fn from_str(text: &str) -> Result<Self, ConfigError> {
        match text {
            "human" => Ok(Self::Human),
            "json" => Ok(Self::Json),
            _ => Err(bad_value("log_format", text, "write human or json")),
        }
    }
}

/// A severity of log lines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs, reason = "the names say it")]
pub enum LogLevel {
    Error,
    Warn,
    #[default]
    Info,
    Debug,
    Trace,
}

#[cfg(feature = "commands")]
mod subscriber {
    use std::io::{self, IsTerminal};
    use std::sync::Arc;
    use std::{fmt, thread};

    use rustix::event::Timespec;
    use tracing::level_filters::LevelFilter;
    use tracing::{Event, Level, Subscriber};
    use tracing_subscriber::fmt::format::{JsonFields, Writer};
    use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields, format};
    use tracing_subscriber::registry::LookupSpan;

    use super::{LogFormat, LogLevel};
    use crate::command_line::write_within;
    use crate::log_lines::{LineWriter, Log, LogLines, writer_that_never_waits};

    /// How long the last line of a program waits for a reader.
    const LAST_WAIT_MAX: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };

    /// Writes log lines to stderr from now on, and never waits for its reader. If stderr leads to
    /// the journal of systemd, each line begins with its priority, which the journal takes off, and
    /// the journal adds the time.
    ///
    /// # Errors
    /// The system's error: the thread cannot start.
    pub fn start(log_format: LogFormat, level: LogLevel) -> io::Result<Log> {
        let level = match level {
            LogLevel::Error => LevelFilter::ERROR,
            LogLevel::Warn => LevelFilter::WARN,
            LogLevel::Info => LevelFilter::INFO,
            LogLevel::Debug => LevelFilter::DEBUG,
            LogLevel::Trace => LevelFilter::TRACE,
        };
        let log = Arc::new(LogLines::new(writer_that_never_waits()));
        let (own, of_events) = (log.clone(), log.clone());
        thread::Builder::new().name("farside-log".to_owned()).spawn(move || {
            own.write_all(
                |lines| write_within(lines, None),
                |lines| tracing::warn!(lines, "FS-054 dropped lines of the log without a reader"),
            );
        })?;
        let lines = tracing_subscriber::fmt()
            .with_max_level(level)
            .with_ansi(io::stderr().is_terminal())
            .with_writer(move || LineWriter(of_events.clone()))
            // If stderr is closed, reporting that on stderr would panic.
            .log_internal_errors(false);
        let (human, is_journal) = (format().with_target(false), is_journal());
        match (log_format, is_journal) {
            (LogFormat::Human, false) => lines.event_format(human).init(),
            (LogFormat::Human, true) => {
                lines.event_format(Prioritized(human.without_time())).init()
            }
            (LogFormat::Json, false) => lines.json().init(),
            (LogFormat::Json, true) => {
                let json = Prioritized(format().json());
                lines.fmt_fields(JsonFields::new()).event_format(json).init();
            }
        }
        Ok(Log(log))
    }

    /// Prints the one line that says why a program ends. Without a reader it waits for a
    /// second.
    pub fn report(program: &str, line: &str) {
        write_within(format!("{program}: {line}\n").as_bytes(), Some(&LAST_WAIT_MAX));
    }

    /// Whether stderr is the stream that systemd names in `JOURNAL_STREAM`.
    fn is_journal() -> bool {
        let (stream, stderr) = (std::env::var("JOURNAL_STREAM"), rustix::fs::fstat(io::stderr()));
        stderr.is_ok_and(|stat| stream == Ok(format!("{}:{}", stat.st_dev, stat.st_ino)))
    }

    /// Puts a priority before each line, as sd-daemon(3) describes it.
    struct Prioritized<F>(F);

    impl<S, N, F> FormatEvent<S, N> for Prioritized<F>
    where
        S: Subscriber + for<'a> LookupSpan<'a>,
        N: for<'a> FormatFields<'a> + 'static,
        F: FormatEvent<S, N>,
    {
        fn format_event(
            &self,
            context: &FmtContext<'_, S, N>,
            mut writer: Writer<'_>,
            event: &Event<'_>,
        ) -> fmt::Result {
            let priority = match *event.metadata().level() {
                Level::ERROR => 3,
                Level::WARN => 4,
                Level::INFO => 6,
                Level::DEBUG | Level::TRACE => 7,
            };
            write!(writer, "<{priority}>")?;
            self.0.format_event(context, writer, event)
        }
    }
}
