//! The line on stderr that shows which phase a run is in.

use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// The time between two drawings of the line.
const TICK: Duration = Duration::from_millis(100);

/// A line on stderr; invisible if stderr is no terminal.
pub struct ProgressLine(ProgressBar);

impl ProgressLine {
    /// A line with the name of a phase, and the time since now.
    pub fn new(phase: &'static str) -> Self {
        let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
        let style = ProgressStyle::with_template("{spinner} {msg} {elapsed}");
        let bar = bar.with_style(style.unwrap_or_else(|_| ProgressStyle::default_spinner()));
        bar.set_message(phase);
        bar.enable_steady_tick(TICK);
        Self(bar)
    }
}

impl Drop for ProgressLine {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}
