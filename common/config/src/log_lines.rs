//! The lines of the log on their way to stderr.
//!
//! A line that stderr takes at once is written at once. Otherwise a thread writes it, and those
//! behind it. So a log without a reader, such as a full pipe, stops no other thread: lines for
//! which there is no room are dropped and counted.

use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::fs::{FileType, Mode, OFlags};
use rustix::io::Errno;
use rustix::net::SendFlags;
use rustix::stdio::stderr;

/// Limit on the bytes that wait. Further lines are dropped.
const WAITING_BYTES_MAX: usize = 256 << 10;
/// How long the end of a program waits for the lines that are left.
const END_WAIT_MAX: Duration = Duration::from_secs(1);

/// Writes what can be written without waiting. Returns how many of the bytes need no more care.
pub(crate) type TryWrite = Box<dyn Fn(&[u8]) -> usize + Send + Sync>;

/// The lines that wait to be written.
pub(crate) struct LogLines {
    try_write: TryWrite,
    state: Mutex<State>,
    has_changed: Condvar,
}

#[derive(Default)]
struct State {
    waiting: Vec<u8>,
    is_writing: bool,
    /// The lines that were dropped since the last report of it.
    dropped: u64,
}

impl LogLines {
    pub(crate) fn new(try_write: TryWrite) -> Self {
        Self { try_write, state: Mutex::default(), has_changed: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // A panic leaves no line half changed.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes a line, has it written, or drops it. Does not wait.
    fn push(&self, line: &[u8]) {
        let mut state = self.lock();
        let is_first = state.waiting.is_empty() && !state.is_writing;
        let written = if is_first { (self.try_write)(line) } else { 0 };
        let rest = line.get(written..).unwrap_or_default();
        if rest.is_empty() {
            return;
        }
        if state.waiting.len() + rest.len() > WAITING_BYTES_MAX {
            state.dropped += 1;
            return;
        }
        state.waiting.extend_from_slice(rest);
        self.has_changed.notify_all();
    }

    /// Writes lines without end. `report` is called with the number of lines that were dropped,
    /// once there is room again.
    pub(crate) fn write_all(&self, mut write: impl FnMut(&[u8]), report: impl Fn(u64)) {
        let mut lines = Vec::new();
        loop {
            let mut state = self.lock();
            while state.waiting.is_empty() {
                state.is_writing = false;
                self.has_changed.notify_all();
                state = self.has_changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
            lines.clear();
            std::mem::swap(&mut lines, &mut state.waiting);
            state.is_writing = true;
            let dropped = std::mem::take(&mut state.dropped);
            drop(state);
            // Now there is room for the report, behind the lines that were kept.
            if dropped > 0 {
                report(dropped);
            }
            write(&lines);
        }
    }

    /// Waits until all lines are written, but not longer than this.
    fn wait_written(&self, wait_max: Duration) {
        let (started, mut state) = (Instant::now(), self.lock());
        while state.is_writing || !state.waiting.is_empty() {
            let left = wait_max.saturating_sub(started.elapsed());
            if left.is_zero() {
                return;
            }
            let waited = self.has_changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

/// Keeps the log of a program. Dropping it waits for the last lines, for a second at most.
#[must_use = "the last lines of a program are lost without it"]
pub struct Log(pub(crate) Arc<LogLines>);

impl Drop for Log {
    fn drop(&mut self) {
        self.0.wait_written(END_WAIT_MAX);
    }
}

/// The writer of one line.
pub(crate) struct LineWriter(pub(crate) Arc<LogLines>);

impl io::Write for LineWriter {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        self.0.push(line);
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Returns a function that writes to stderr what it takes without a wait. It returns how many bytes
/// need no more care: after an error that is all of them.
pub(crate) fn writer_that_never_waits() -> TryWrite {
    let kind = rustix::fs::fstat(stderr()).map(|stat| FileType::from_raw_mode(stat.st_mode));
    match kind {
        Ok(FileType::Socket) => Box::new(|bytes| {
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            taken(rustix::net::send(stderr(), bytes, flags), bytes)
        }),
        // Other programs share the open pipe or terminal, so its mode must not change.
        Ok(FileType::Fifo | FileType::CharacterDevice) => {
            let flags = OFlags::WRONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
            match rustix::fs::open("/proc/self/fd/2", flags, Mode::empty()) {
                Ok(own) => Box::new(move |bytes| taken(rustix::io::write(&own, bytes), bytes)),
                Err(_) => Box::new(|_| 0),
            }
        }
        _ => Box::new(|bytes| taken(rustix::io::write(stderr(), bytes), bytes)),
    }
}

fn taken(written: rustix::io::Result<usize>, bytes: &[u8]) -> usize {
    match written {
        Ok(count) => count,
        Err(Errno::AGAIN | Errno::INTR) => 0,
        // Stderr is closed, or its reader is gone.
        Err(_) => bytes.len(),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::thread;

    use super::*;

    /// There is no reader at first. The lines that had room come in order, then the number of
    /// the others, and then later lines.
    #[test]
    fn lines_without_a_reader_are_dropped_and_counted() {
        let lines = Arc::new(LogLines::new(Box::new(|_| 0)));
        let (written, reads) = mpsc::channel::<Vec<u8>>();
        let (reader, is_read) = mpsc::sync_channel::<()>(0);
        let own = lines.clone();
        thread::spawn(move || {
            let write = |lines: &[u8]| {
                is_read.recv().unwrap();
                written.send(lines.to_vec()).unwrap();
            };
            own.write_all(write, |dropped| own.push(format!("{dropped} dropped\n").as_bytes()));
        });
        let line = [&[b'x'; 1023][..], b"\n"].concat();
        lines.push(b"first\n");
        while !lines.lock().is_writing {
            thread::yield_now();
        }
        let all = 3 * WAITING_BYTES_MAX / line.len();
        for _ in 0..all {
            lines.push(&line);
        }
        // It gives up, because there is no reader.
        lines.wait_written(Duration::from_millis(1));
        let mut read = Vec::new();
        while !read.ends_with(b"dropped\n") {
            reader.send(()).unwrap();
            read.extend(reads.recv().unwrap());
        }
        let kept = WAITING_BYTES_MAX / line.len();
        let expected = [b"first\n", &line.repeat(kept)[..]].concat();
        assert!(read.starts_with(&expected));
        let report = String::from_utf8_lossy(&read[expected.len()..]).into_owned();
        assert_eq!(report, format!("{} dropped\n", all - kept));
        lines.push(b"later\n");
        reader.send(()).unwrap();
        lines.wait_written(Duration::from_secs(60));
        assert_eq!(reads.recv().unwrap(), b"later\n");
    }

    /// The rest of a line that was begun waits, and so do the lines behind it.
    #[test]
    fn a_line_is_written_at_once_as_far_as_there_is_room() {
        let (written, reads) = mpsc::channel::<Vec<u8>>();
        let lines = LogLines::new(Box::new(move |line| {
            let part = &line[..line.len().min(4)];
            written.send(part.to_vec()).unwrap();
            part.len()
        }));
        lines.push(b"one\n");
        assert!(lines.lock().waiting.is_empty());
        lines.push(b"two and a half\n");
        lines.push(b"3\n");
        assert_eq!(reads.try_iter().collect::<Vec<_>>(), [b"one\n", b"two "]);
        assert_eq!(lines.lock().waiting, b"and a half\n3\n");
    }
}
