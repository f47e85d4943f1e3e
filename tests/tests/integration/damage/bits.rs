//! Flips single bits: superblock, lease, directory, row headers, slots, block headers, values. Then
//! damaged region files: `kv-server` refuses them in one line, or serves what they hold.
//! `tests/tests/server/restart.rs` has the files that hold no region.

use std::path::Path;

use farside::ConnectError::{self, Unreachable};
use farside::Error;
use farside::OperationError::{Indeterminate, Layout};
use farside_layout::{
    BLOCK_HEADER_BYTES, CHUNK_BYTES, ChunkEntry, ChunkUse, INCARNATION_OFFSET, Row, SUBTABLE_BYTES,
    WINDOW_BYTES, block_bytes,
};
use farside_tests::command::complaints;
use farside_tests::{fill, left_out, wait_until};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use zerocopy::{FromBytes, IntoBytes};

use super::*;

const NEW_VALUE_BYTES: usize = 20;

/// The lengths of a dozen keys' values. Each key shares its window with others.
const LENGTHS: [usize; 12] = [24, 0, 1, 7, 32, 33, 100, 500, 1000, 4096, 20_000, 100_000];

/// Returns a region with one subtable, whose windows are well filled.
fn crowded() -> (Scene, Vec<Sample>) {
    let scene = Scene::new(&format!("--memory 32MiB --index 8KiB --grace-ms {GRACE_MS_MAX}"));
    let mut session = scene.cold();
    let mut samples = Vec::new();
    for (n, bytes) in LENGTHS.into_iter().enumerate() {
        let key = format!("key-{n:02}").into_bytes();
        let sample = Sample { value: value(n as u64, 0, bytes), key };
        session.put(&sample.key, &sample.value).unwrap();
        samples.push(sample);
        // Another key with the same window and fingerprint: only hint and key differ.
        let (window, hash) = (scene.window(&samples[n].key), scene.hash(&samples[n].key));
        let twin = (0u32..).map(|m| format!("twin-{m}").into_bytes()).find(|twin| {
            let same = scene.hash(twin).fingerprint() == hash.fingerprint();
            same && scene.window(twin) == window
        });
        session.put(twin.unwrap(), b"another's").unwrap();
    }
    for n in 0..100u32 {
        session.put(format!("filler-{n}").as_bytes(), b"a filler's value").unwrap();
    }
    (scene, samples)
}

/// A key and its sessions: one with a cached location, one without a cache, and one that only GETs.
struct Trial<'s> {
    scene: &'s Scene,
    sample: &'s Sample,
    new: Vec<u8>,
    sessions: [(&'static str, Session); 2],
    cold_session: Session,
    tally: Tally,
}

/// The numbers of GETs under damage that found the value, missed it, and failed. They show that the
/// damage was hit.
#[derive(Debug, Default)]
struct Tally {
    right: u32,
    missed: u32,
    failed: u32,
}

impl Tally {
    fn add(&mut self, seen: &Result<bool>) {
        let counter = match seen {
            Ok(true) => &mut self.right,
            Ok(false) => &mut self.missed,
            Err(_) => &mut self.failed,
        };
        *counter += 1;
    }
}

impl<'s> Trial<'s> {
    fn new(scene: &'s Scene, sample: &'s Sample) -> Self {
        let sessions = [("cached", scene.warm()), ("uncached", scene.cold())];
        let new = value(99, 1, NEW_VALUE_BYTES);
        let mut trial = Self {
            scene,
            sample,
            new,
            sessions,
            cold_session: scene.cold(),
            tally: Tally::default(),
        };
        trial.cache_undamaged_location();
        trial
    }

    /// Lets the session with a cache cache the undamaged location again.
    fn cache_undamaged_location(&mut self) {
        for (_, session) in &mut self.sessions {
            session.clear_cache();
            let found = session.get(&self.sample.key).unwrap().unwrap();
            assert!(found.data == self.sample.value, "the damage was not undone");
        }
    }

    /// GETs with this bit flipped; returns the result of the session without a cache.
    fn get_with_flipped_bit(&mut self, at: Bit) -> Result<bool> {
        self.scene.flip(at);
        let Sample { key, value } = self.sample;
        let what = format!("{at:?}, cached GET");
        let cached = get(&mut self.sessions[0].1, key, &[value], &what);
        assert!(
            !matches!(
                cached,
                Err(Error::Connect(Unreachable { .. }) | Error::Operation(Indeterminate))
            ),
            "{what}"
        );
        let seen = get(&mut self.cold_session, key, &[value], &format!("{at:?}, uncached GET"));
        self.scene.flip(at);
        // After the repair, a location cached under damage must do no harm either.
        let what = format!("{at:?}, GET after the repair");
        assert!(matches!(get(&mut self.sessions[0].1, key, &[value], &what), Ok(true)), "{what}");
        self.tally.add(&seen);
        seen
    }

    /// Makes all changes with this bit flipped, and restores the region after each.
    ///
    /// A word with a wrong target may lead to an unlinked block of the same key and generation,
    /// from an earlier trial. Nothing distinguishes it from the right block.
    fn change(&mut self, at: Bit) {
        let Sample { key, value: old } = self.sample;
        let window = self.scene.window(key);
        let redirects = at.bit < TARGET_BITS && self.scene.slots(window).any(|s| s == at.offset);
        for change in CHANGES {
            for turn in 0..self.sessions.len() {
                let mut saved = self.scene.save(window);
                saved.keep(&self.scene.region, at.offset, 1);
                self.scene.flip(at);
                // Also saves the headers to which the damaged words lead.
                for slot in self.scene.slots(window) {
                    saved.keep_block(&self.scene.region, self.scene.word(slot));
                }
                let (name, session) = &mut self.sessions[turn];
                let what = format!("{at:?}, {name} {change:?}");
                let mut allowed = change.apply(session, key, old, &self.new, &what);
                if redirects {
                    allowed = vec![old, &self.new];
                }
                let what = format!("{what}, GET by the same");
                let seen = get(session, key, &allowed, &what);
                self.tally.add(&seen);
                let what = format!("{what}, GET by another");
                let _ = get(&mut self.cold_session, key, &allowed, &what);
                saved.restore(&self.scene.region);
                self.cache_undamaged_location();
            }
        }
    }
}

/// Runs the test for each key: with every bit for the first one, every seventh for the others.
fn each_sample(mut test: impl FnMut(&Scene, &Sample, usize)) {
    let (scene, samples) = crowded();
    for (n, sample) in samples.iter().enumerate() {
        test(&scene, sample, if n == 0 { 1 } else { 7 });
    }
    if !scene.is_in_grace() {
        let why = "this machine is so slow that blocks of restored words may be in use again";
        return left_out("a part of the flipped bits", why);
    }
    let mut session = scene.cold();
    for Sample { key, value } in &samples {
        assert!(session.get(key).unwrap().unwrap().data == *value, "the damage was not undone");
    }
    scene.server.assert_verifies();
}

/// Makes an attempt with each bit of each key's window flipped.
fn each_window_bit(attempt: impl Fn(&mut Trial<'_>, Bit)) {
    each_sample(|scene, sample, step| {
        let mut trial = Trial::new(scene, sample);
        let window = bits(scene.window(&sample.key), WINDOW_BYTES / 8);
        let in_time = window.step_by(step).take_while(|_| scene.is_in_grace());
        in_time.for_each(|at| attempt(&mut trial, at));
        let Tally { right, missed, failed } = trial.tally;
        assert!(
            !scene.is_in_grace() || right > missed && missed > 0 && failed > 0,
            "{:?}",
            trial.tally
        );
    });
}

#[on(shm, tcp_in_soak)]
fn a_get_with_a_flipped_bit_in_the_window_returns_no_wrong_value() {
    each_window_bit(|trial, at| drop(trial.get_with_flipped_bit(at)));
}

#[on(shm, tcp_in_soak)]
fn a_change_with_a_flipped_bit_in_the_window_stores_no_wrong_value() {
    each_window_bit(|trial, at| trial.change(at));
}

#[on(shm, tcp_in_soak)]
fn a_flipped_bit_in_a_block_is_an_error_except_in_the_mark() {
    each_sample(|scene, sample, step| {
        let block = scene.word(scene.slot_of(&sample.key)).block().unwrap();
        let start = block.address.claimed_offset();
        let used = block_bytes(sample.key.len(), sample.value.len());
        let mut trial = Trial::new(scene, sample);
        let header = bits(start, BLOCK_HEADER_BYTES / 8);
        let payload = bits(start + BLOCK_HEADER_BYTES, (used - BLOCK_HEADER_BYTES).div_ceil(8));
        let sampled = payload.step_by((used / 100).max(1) as usize);
        for at in header.chain(sampled).step_by(step).take_while(|_| scene.is_in_grace()) {
            let seen = trial.get_with_flipped_bit(at);
            let byte = at.offset + u64::from(at.bit / 8);
            let covered = (start + 4..start + used).contains(&byte);
            let expected = if covered { seen.is_err() } else { matches!(seen, Ok(true)) };
            assert!(expected, "{at:?}, byte {} of the block: {seen:?}", byte - start);
        }
        let header = bits(start, BLOCK_HEADER_BYTES / 8);
        header.step_by(step).take_while(|_| scene.is_in_grace()).for_each(|at| trial.change(at));
    });
}

fn is_damage(error: &Error) -> bool {
    matches!(error, Error::Operation(Layout(_)) | Error::Connect(ConnectError::Layout(_)))
}

// Not over TCP: connecting reads no superblock, only opening a session does.
#[on(shm)]
fn a_flipped_bit_in_the_superblock_refuses_new_sessions_and_disturbs_no_old_one() {
    let (scene, samples) = crowded();
    let sample = &samples[0];
    let client = scene.server.client();
    let mut trial = Trial::new(&scene, sample);
    let superblock_words = INCARNATION_OFFSET / 8 + 2;
    for at in bits(0, superblock_words) {
        assert!(matches!(trial.get_with_flipped_bit(at), Ok(true)), "{at:?}");
        scene.flip(at);
        let what = format!("{at:?}, connecting");
        let connected = timed(&what, || scene.server.client_builder().connect());
        let session = timed(&what, || client.session());
        if at.offset < INCARNATION_OFFSET {
            assert!(connected.is_err_and(|error| error.exit_code() == 4), "{what}");
            assert!(session.is_err_and(|error| is_damage(&error)), "{what}");
        } else if let Ok(mut session) = session {
            let _ = get(&mut session, &sample.key, &[&sample.value], &what);
        }
        scene.flip(at);
    }
    scene.server.assert_verifies();
}

#[on(shm, tcp_in_soak)]
fn a_flipped_bit_in_the_directory_is_noticed() {
    let (scene, samples) = crowded();
    let sample = &samples[0];
    let client = scene.server.client();
    let mut trial = Trial::new(&scene, sample);
    let window = scene.window(&sample.key);
    for at in bits(scene.directory_entry(scene.hash(&sample.key)), 1) {
        assert!(
            matches!(trial.get_with_flipped_bit(at), Ok(true)),
            "{at:?}: an old copy is as good"
        );
        scene.flip(at);
        if let Ok(mut session) = timed(&format!("{at:?}, connecting"), || client.session()) {
            let what = format!("{at:?}, a new session");
            let _ = get(&mut session, &sample.key, &[&sample.value], &what);
            let allowed = [&sample.value[..], &trial.new];
            let _ = timed(&what, || session.put(&sample.key, &trial.new));
            let _ = get(&mut session, &sample.key, &allowed, &what);
        }
        scene.flip(at);
        assert_eq!(scene.window(&sample.key), window);
        let mut session = scene.cold();
        session.put(&sample.key, &sample.value).unwrap();
        trial.cache_undamaged_location();
    }
    scene.server.assert_verifies();
}

#[on(shm, tcp_in_soak)]
fn a_flipped_bit_in_the_lease_costs_a_connection_and_nothing_else() {
    let (scene, samples) = crowded();
    let Sample { key, value } = &samples[0];
    let mut session = scene.warm();
    let entries = (1..16).map(|client| scene.geometry.client_entry(client).unwrap());
    let entries: Vec<u64> = entries.collect();
    for bit in 0..64 {
        session.put(key, value).unwrap();
        let in_use = |offset: &&u64| scene.region.load(**offset).unwrap() != 0;
        for offset in entries.iter().filter(in_use) {
            scene.flip(Bit { offset: *offset, bit });
        }
        let what = format!("bit {bit} of the lease");
        let put = timed(&what, || session.put(key, value));
        assert!(matches!(put, Ok(()) | Err(Error::Operation(Indeterminate))), "{what}: {put:?}");
        assert!(matches!(get(&mut session, key, &[value], &what), Ok(true)), "{what}");
    }
    scene.server.assert_verifies();
}

/// Runs a server on the file until it serves, or has refused with one line after its warnings;
/// returns its log.
pub(super) fn start_briefly(file: &Path) -> String {
    let folder = tempfile::tempdir().unwrap();
    let arguments = format!("--region-file {}", file.display());
    let mut server = ServerProcess::spawn_in(folder.path(), &arguments, |command| command);
    wait_until("it serves or refuses", Duration::from_secs(20), || {
        server.has_exited() || server.log().contains("serving")
    });
    let log = server.log();
    assert!(!log.contains("panicked"), "{log}");
    let last = log.lines().last().unwrap_or_default();
    assert!(last.starts_with("kv-server: ") || log.contains("serving"), "{log}");
    log
}

/// Returns a region with a hundred keys, whose server stopped cleanly.
fn region(arguments: &str) -> ServerProcess {
    let mut server = ServerProcess::start_with_file(arguments);
    fill(&mut server.session(), 0..100, |n| value(n, 0, 100));
    assert_eq!(server.terminate(), Some(0));
    server
}

fn geometry(server: &ServerProcess) -> Geometry {
    let file = std::fs::File::open(server.region_file()).unwrap();
    superblock(&Region::map_read_only(&file).unwrap()).1.geometry()
}

/// Continuing such a split would overwrite the keys of other subtables.
#[on(shm, tcp_in_soak)]
fn an_unfinished_split_that_leads_to_other_subtables_is_refused() {
    let server = region("--memory 8MiB --index 32KiB");
    let whole = std::fs::read(server.region_file()).unwrap();
    let heap = geometry(&server).chunk_offset(0).unwrap();
    let subtable = |number: u64| heap + number * SUBTABLE_BYTES;
    // A split of a subtable before, between and after the two in the directory; and one that leads
    // to itself and beyond the others.
    for (parent, new) in [(0, [1, 2]), (1, [0, 3]), (3, [2, 1]), (2, [2, 8])] {
        let (row, _) = Row::ref_from_prefix(&whole[subtable(parent) as usize..]).unwrap();
        let header = row.header.with_forward(new.map(subtable));
        let mut content = whole.clone();
        content[subtable(parent) as usize..][..header.as_bytes().len()]
            .copy_from_slice(header.as_bytes());
        std::fs::write(server.region_file(), &content).unwrap();
        let log = start_briefly(&server.region_file());
        let has_refused = log.contains("damaged") && complaints(&log) == 1;
        assert!(has_refused, "{parent} to {new:?}: {log}");
        let after = std::fs::read(server.region_file()).unwrap();
        assert!(after[heap as usize..] == content[heap as usize..], "{parent} to {new:?}");
    }
}

/// The next server either refuses the file in one line, or serves the region; it never panics.
#[on(shm, tcp_in_soak)]
fn random_tables_are_refused_or_served() {
    let server = region("--memory 8MiB");
    let whole = std::fs::read(server.region_file()).unwrap();
    let geometry = geometry(&server);
    let chunk_table = geometry.chunk_entry(0).unwrap();
    let directories = geometry.directory_offset(0).unwrap();
    let heap = geometry.chunk_offset(0).unwrap();
    let mut random = SmallRng::seed_from_u64(3);
    for (name, from, to) in [
        ("directories", directories, chunk_table),
        ("chunk table", chunk_table, chunk_table + 8 * u64::from(geometry.chunks())),
        ("client table", 4096, directories),
        ("heap", heap, heap + CHUNK_BYTES),
        ("everything after the superblock", 4096, whole.len() as u64),
    ] {
        let mut content = whole.clone();
        random.fill_bytes(&mut content[from as usize..to as usize]);
        std::fs::write(server.region_file(), &content).unwrap();
        let log = start_briefly(&server.region_file());
        assert!(log.contains("serving") || complaints(&log) == 1, "{name}: {log}");
    }
    // Each chunk with each possible use, of which only one is right.
    for chunk in 0..geometry.chunks() {
        let uses = [ChunkUse::Free, ChunkUse::Subtables, ChunkUse::Continued];
        for entry in uses.map(|chunk_use| ChunkEntry::new(chunk_use).bits()) {
            let mut content = whole.clone();
            let at = geometry.chunk_entry(chunk).unwrap() as usize;
            content[at..at + 8].copy_from_slice(&entry.to_le_bytes());
            std::fs::write(server.region_file(), &content).unwrap();
            start_briefly(&server.region_file());
        }
    }
}
