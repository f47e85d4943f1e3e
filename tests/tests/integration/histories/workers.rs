//! The worker processes of a run, and the operations that they recorded.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use farside::Client;
use farside_fabric::boot_time_ns;
use farside_linearizability::{Ended, Record};
use farside_protocol::Action;
use farside_tests::Worker;
use farside_tests::faults::Fault;
use farside_tests::recorder::{COLD_KEYS, COUNTERS, RECORD_BYTES, RecordingSession, new_key, read};

/// The number of recording sessions of a worker.
const SESSIONS: u64 = 3;

/// A worker process.
pub(crate) struct Member {
    /// The number of its first session.
    pub(crate) first: u64,
    pub(crate) worker: Worker,
    pub(crate) is_faulty: bool,
    /// Whether it uses another address of the server than the others.
    pub(crate) is_over_tcp: bool,
}

/// The workers of a run, and the files of all sessions that there have been.
pub(crate) struct Workers {
    folder: PathBuf,
    pub(crate) members: Vec<Member>,
    sessions: u64,
    /// The number of sessions that read every key at the end.
    readers: u64,
    /// Whether keys may be absent at the end.
    is_cache: bool,
    /// First sessions of killed workers, and times by which these were certainly dead.
    deaths: Vec<(u64, u64)>,
}

/// The operations of all sessions.
pub(crate) struct RecordedRun {
    pub(crate) history: Vec<Record>,
    /// Sessions that stopped because their file was full.
    pub(crate) full: u64,
    /// Whether a client that was not killed has an operation without a known result.
    pub(crate) has_lost_call: bool,
}

impl RecordedRun {
    /// Returns the number of operations with this result.
    pub(crate) fn count(&self, end: Ended) -> u64 {
        self.history.iter().filter(|record| record.result == end).count() as u64
    }
}

impl Workers {
    /// Makes this folder for the files.
    pub(crate) fn new(folder: PathBuf) -> Self {
        std::fs::create_dir(&folder).unwrap();
        let (members, deaths) = (Vec::new(), Vec::new());
        Self { folder, members, sessions: 0, readers: 0, is_cache: false, deaths }
    }

    /// As [`Workers::new`], of a server that evicts keys.
    pub(crate) fn of_cache(folder: PathBuf) -> Self {
        Self { is_cache: true, ..Self::new(folder) }
    }

    /// Starts a worker by a function of the program, its number, and its arguments after the
    /// address.
    pub(crate) fn start(
        &mut self,
        mode: Option<&str>,
        start: impl FnOnce(&str, u64, Vec<String>) -> Worker,
    ) -> &mut Member {
        let first = self.sessions;
        self.sessions += SESSIONS;
        let mut arguments = vec![self.folder.display().to_string()];
        arguments.extend([first, SESSIONS].map(|number| number.to_string()));
        arguments.extend(mode.map(str::to_owned));
        let worker = start(env!("CARGO_BIN_EXE_history-worker"), first, arguments);
        let is_long = mode.is_some_and(|mode| mode.starts_with("long"));
        let is_faulty = is_long || matches!(mode, Some("faults" | "faulty-cache"));
        let member = Member { first, worker, is_faulty, is_over_tcp: false };
        self.members.push(member);
        self.members.last_mut().unwrap()
    }

    /// Removes the worker at this place.
    pub(crate) fn take(&mut self, at: usize) -> Member {
        self.members.swap_remove(at)
    }

    /// Notes that a worker is dead.
    pub(crate) fn note_death(&mut self, first: u64) {
        self.deaths.push((first, boot_time_ns()));
    }

    /// Kills the worker at this place. Returns it, and whether its sessions had begun.
    pub(crate) fn kill(&mut self, at: usize) -> (bool, bool) {
        let Member { first, worker, is_faulty, .. } = self.take(at);
        worker.kill();
        self.note_death(first);
        (is_faulty, self.folder.join(first.to_string()).exists())
    }

    /// Whether the process of a history is one that read all keys at the end.
    pub(crate) fn is_reader(&self, process: u64) -> bool {
        process >= self.sessions
    }

    /// Tells all workers to stop.
    pub(crate) fn stop(&self) {
        std::fs::write(self.folder.join("stop"), []).unwrap();
    }

    /// Returns the approximate number of recorded operations: files in /dev/shm consist of touched
    /// pages.
    pub(crate) fn operations(&self) -> u64 {
        let bytes = |file: std::fs::DirEntry| file.metadata().unwrap().blocks() * 512;
        let files = std::fs::read_dir(&self.folder).unwrap();
        files.map(|file| bytes(file.unwrap())).sum::<u64>() / RECORD_BYTES
    }

    /// Returns the files of this name of all workers.
    pub(crate) fn files<'w>(&'w self, name: &'w str) -> impl Iterator<Item = (u64, Vec<u8>)> + 'w {
        (0..self.sessions).step_by(SESSIONS as usize).map(move |first| {
            let file = self.folder.join(format!("{name}-{first}"));
            (first, std::fs::read(file).unwrap_or_default())
        })
    }

    /// The counts of faults of all workers.
    pub(crate) fn faults(&self) -> [u64; Fault::NAMES.len()] {
        let mut all = [0; Fault::NAMES.len()];
        for (_, bytes) in self.files("faults") {
            for (total, count) in all.iter_mut().zip(bytes.as_chunks().0) {
                *total += u64::from_le_bytes(*count);
            }
        }
        all
    }

    /// Has a new client read all keys: hot and cold keys are recorded, others must have their first
    /// value, or be absent from a cache. Returns the number of the others that it found.
    pub(crate) fn read_all(&mut self, client: &Client) -> u64 {
        let (mut session, process) = (client.session().unwrap(), self.sessions + self.readers);
        self.readers += 1;
        let mut read = 0;
        for (first, inserted) in self.files("new") {
            let inserted = inserted.first_chunk().copied().unwrap_or_default();
            for number in 0..u64::from_le_bytes(inserted) {
                let (key, value) = new_key(first, number, self.is_cache);
                let found = session.get(key).unwrap();
                read += u64::from(found.is_some());
                let is_lost = found.is_none() && self.is_cache;
                let is_its = found.is_some_and(|found| found.data == value);
                assert!(is_lost || is_its, "new key {key:x?}");
            }
        }
        let file = self.folder.join(process.to_string());
        let end = if self.is_cache { COLD_KEYS.end } else { COUNTERS.end };
        let mut session = RecordingSession::new(session, &file, process, end).unwrap();
        for key in 0..end {
            session.run(key, Action::Get, 0).unwrap();
        }
        read
    }

    /// Returns all recorded operations. A dead client's last operation takes effect at most
    /// `late_ns` after the death; `None` if that is not known.
    pub(crate) fn recorded(&self, late_ns: Option<u64>) -> RecordedRun {
        let mut recorded = RecordedRun { history: Vec::new(), full: 0, has_lost_call: false };
        for process in 0..self.sessions + self.readers {
            let is_its_worker =
                |(first, _): &&(u64, u64)| (*first..first + SESSIONS).contains(&process);
            let death = self.deaths.iter().find(is_its_worker);
            let died = death.zip(late_ns).map(|((_, at), late_ns)| at + late_ns);
            let file = self.folder.join(process.to_string());
            // A worker that was killed before its sessions connected has no file.
            if file.exists() {
                let records = read(&file, process, died).unwrap();
                let is_unknown = |record: &Record| record.result == Ended::Unknown;
                recorded.has_lost_call |= death.is_none() && records.iter().any(is_unknown);
                let room = std::fs::metadata(&file).unwrap().len() / RECORD_BYTES;
                let is_full = process < self.sessions && records.len() as u64 == room;
                recorded.full += u64::from(is_full);
                recorded.history.extend(records);
            }
        }
        recorded
    }
}

/// Writes a history to a file that survives the test; returns its path.
pub(crate) fn keep(history: &[Record]) -> PathBuf {
    let file = format!("history-{}-{}.jsonl", std::process::id(), boot_time_ns());
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(file);
    farside_linearizability::write(history, std::fs::File::create(&path).unwrap()).unwrap();
    path
}
