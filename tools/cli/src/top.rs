//! `top`: a live view of the servers in the terminal, or one view as text.

mod figures;
mod view;

use std::io::{IsTerminal, Write};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::Context;
use farside_config::command_line::exit_code;
use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;

use self::figures::{Collector, Figures};
use self::view::{draw, height_of};
use crate::args::{Args, Top};
use crate::connect;
use crate::output::{self, ExitStatus, Usage};
use crate::stopping::StopSignal;

/// The shortest time from one view to the next.
const INTERVAL_MIN: Duration = Duration::from_millis(100);
/// The first views are this far apart. Clients describe themselves only when the first one asks,
/// and rates need two descriptions.
const FIRST_INTERVAL: Duration = Duration::from_millis(200);
/// The number of the view from which on there are rates.
const VIEWS_UNTIL_RATES: u32 = 3;
/// How often the terminal is asked for keys, and the process for signals.
const KEYS_INTERVAL: Duration = Duration::from_millis(50);
/// How long the end of the command waits for a server that does not answer.
const END_TIMEOUT: Duration = Duration::from_millis(500);
/// The width of a view as text.
const TEXT_WIDTH: u16 = 118;

/// `top`: shows the view until a key or a signal ends it.
pub(crate) fn top(args: &Args, options: &Top) -> anyhow::Result<ExitStatus> {
    let has_terminal = std::io::stdout().is_terminal() && std::io::stdin().is_terminal();
    if !options.once && !has_terminal {
        return Err(Usage::error(
            "stdin and stdout are no terminal: `kv-cli top --once` prints one view as text",
        ));
    }
    let server = connect::config(args)?.server.unwrap_or_default();
    let collector = Collector::new(connect::reader(args)?, server);
    let interval = options.interval.max(INTERVAL_MIN);
    match options.once {
        true => print_once(collector, interval),
        false => watch(collector, interval),
    }
}

fn print_once(mut collector: Collector, interval: Duration) -> anyhow::Result<ExitStatus> {
    let mut figures = collector.collect();
    for number in 1..VIEWS_UNTIL_RATES {
        std::thread::sleep(pause_after(number, interval));
        figures = collector.collect();
    }
    let mut stdout = output::stdout();
    for shard in 0..figures.shards.len() {
        stdout.write_all(as_text(&figures, shard)?.as_bytes())?;
    }
    let done = output::finish(stdout)?;
    match figures.shards.iter().all(Result::is_ok) {
        true => Ok(done),
        false => Ok(done.or_failed(exit_code::NO_SERVER)),
    }
}

/// The pause after the view with this number, which counts from 1.
fn pause_after(number: u32, interval: Duration) -> Duration {
    if number + 1 < VIEWS_UNTIL_RATES { interval.min(FIRST_INTERVAL) } else { interval }
}

/// Returns the view of a shard as lines of text.
fn as_text(figures: &Figures, shard: usize) -> anyhow::Result<String> {
    let mut terminal = Terminal::new(TestBackend::new(TEXT_WIDTH, height_of(figures, shard)))?;
    terminal.draw(|frame| draw(frame, figures, shard))?;
    let buffer = terminal.backend().buffer();
    let row = |cells: &[ratatui::buffer::Cell]| {
        let text: String = cells.iter().map(|cell| cell.symbol()).collect();
        text.trim_end().to_owned() + "\n"
    };
    Ok(buffer.content().chunks(usize::from(TEXT_WIDTH)).map(row).collect())
}

/// Gives the terminal back as it was.
struct RestoredTerminal;

impl Drop for RestoredTerminal {
    fn drop(&mut self) {
        ratatui::restore();
    }
}

/// Collects figures in a thread of its own, so that keys work while a server does not answer.
struct CollectingThread {
    figures: Receiver<Figures>,
    stop: mpsc::Sender<()>,
    thread: JoinHandle<()>,
}

impl CollectingThread {
    fn start(mut collector: Collector, interval: Duration) -> anyhow::Result<Self> {
        let (send_figures, figures) = mpsc::channel();
        let (stop, stopped) = mpsc::channel();
        let collect = move || {
            for number in 1.. {
                let is_unread = send_figures.send(collector.collect()).is_err();
                let ended = stopped.recv_timeout(pause_after(number, interval));
                if is_unread || ended != Err(RecvTimeoutError::Timeout) {
                    break;
                }
            }
        };
        let thread = std::thread::Builder::new().name("kv-cli-top".into()).spawn(collect)?;
        Ok(Self { figures, stop, thread })
    }

    /// Ends the thread, so that its client says goodbye, unless that takes too long.
    fn end(self) {
        drop(self.stop);
        let started = Instant::now();
        while !self.thread.is_finished() && started.elapsed() < END_TIMEOUT {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

fn watch(collector: Collector, interval: Duration) -> anyhow::Result<ExitStatus> {
    let stop = StopSignal::listen()?;
    let collecting = CollectingThread::start(collector, interval)?;
    let shown = show(&collecting, &stop);
    collecting.end();
    shown.map(|()| ExitStatus::Done)
}

/// Waits for keys, at most so long. Returns whether the terminal is gone: then the library that
/// reads keys would never return.
fn has_hung_up(timeout: Duration) -> anyhow::Result<bool> {
    let stdin = std::io::stdin();
    let mut polled = [PollFd::new(&stdin, PollFlags::IN)];
    match poll(&mut polled, Some(&timeout.try_into()?)) {
        Ok(_) => Ok(polled[0].revents().intersects(PollFlags::HUP | PollFlags::ERR)),
        Err(Errno::INTR) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

fn show(collecting: &CollectingThread, stop: &StopSignal) -> anyhow::Result<()> {
    let mut terminal = ratatui::try_init().context("the terminal cannot be set up")?;
    let _restored = RestoredTerminal;
    let (mut figures, mut shard) = (Figures::default(), 0);
    loop {
        stop.check()?;
        let newest = collecting.figures.try_iter().last();
        let mut is_changed = newest.is_some();
        figures = newest.unwrap_or(figures);
        if has_hung_up(KEYS_INTERVAL)? {
            return Ok(());
        }
        if event::poll(Duration::ZERO)? {
            let event = event::read()?;
            match event {
                Event::Key(key) if key.kind != KeyEventKind::Release => {
                    if is_end(&key) {
                        return Ok(());
                    }
                    shard = chosen_shard(key.code, shard, figures.shards.len());
                }
                _ => {}
            }
            is_changed = true;
        }
        if is_changed {
            terminal.draw(|frame| draw(frame, &figures, shard))?;
        }
    }
}

fn is_end(key: &KeyEvent) -> bool {
    let is_interrupt = key.modifiers.contains(KeyModifiers::CONTROL);
    matches!(key.code, KeyCode::Char('q') | KeyCode::Esc)
        || is_interrupt && key.code == KeyCode::Char('c')
}

/// Returns the shard to show after a key was pressed.
fn chosen_shard(key: KeyCode, shard: usize, shards: usize) -> usize {
    let last = shards.saturating_sub(1);
    match key {
        KeyCode::Left | KeyCode::Up => shard.checked_sub(1).unwrap_or(last),
        KeyCode::Right | KeyCode::Down | KeyCode::Tab if shard == last => 0,
        KeyCode::Right | KeyCode::Down | KeyCode::Tab => shard + 1,
        KeyCode::Char(digit) => {
            digit.to_digit(10).map_or(shard, |digit| (digit as usize).min(last))
        }
        _ => shard,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_choose_a_shard_that_exists() {
        let after = |shard, key| chosen_shard(key, shard, 3);
        assert_eq!([0, 1, 2].map(|shard| after(shard, KeyCode::Right)), [1, 2, 0]);
        assert_eq!([0, 1, 2].map(|shard| after(shard, KeyCode::Left)), [2, 0, 1]);
        assert_eq!(['0', '2', '9', 'x'].map(|key| after(1, KeyCode::Char(key))), [0, 2, 2, 1]);
        assert_eq!(chosen_shard(KeyCode::Right, 0, 0), 0);
        assert_eq!(chosen_shard(KeyCode::Left, 0, 0), 0);
    }
}
