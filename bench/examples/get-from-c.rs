//! Compares a GET of 64 bytes through `libfarside.so` with the same GET in Rust, in turn and on one
//! thread: `get-from-c SERVER LIBRARY`. `tools/scripts/bench-clients.sh` runs it.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "only a benchmark uses this")]

use std::ffi::{CString, c_char, c_int, c_void};
use std::time::Instant;

const KEYS: u64 = 1000;
const GETS_PER_TURN: u64 = 200_000;
const TURNS: usize = 15;

type Status = c_int;
type Get = unsafe extern "C" fn(
    *mut c_void,
    *const c_void,
    usize,
    *mut c_void,
    usize,
    *mut usize,
    *mut u64,
) -> Status;

/// A function of the library.
///
/// # Safety
/// `F` is the type of the function.
unsafe fn function<F: Copy>(library: *mut c_void, name: &str) -> F {
    let name = CString::new(name).unwrap();
    // SAFETY: both are valid.
    let address = unsafe { libc::dlsym(library, name.as_ptr()) };
    assert!(!address.is_null(), "no {name:?} in the library");
    assert_eq!(size_of::<F>(), size_of_val(&address));
    // SAFETY: by the caller's promise; a pointer to a function has the size of any other.
    unsafe { std::mem::transmute_copy(&address) }
}

/// The library's function to read, and a session.
fn open(library: &str, server: &str) -> (Get, *mut c_void) {
    type New = unsafe extern "C" fn() -> *mut c_void;
    type Set = unsafe extern "C" fn(*mut c_void, *const c_char) -> Status;
    type Open = unsafe extern "C" fn(*const c_void, *mut *mut c_void) -> Status;
    let (library, server) = (CString::new(library).unwrap(), CString::new(server).unwrap());
    // SAFETY: the library may be loaded at any time.
    let library = unsafe { libc::dlopen(library.as_ptr(), libc::RTLD_NOW) };
    assert!(!library.is_null(), "the library cannot be loaded");
    // SAFETY: farside.h declares it so, as all that follow.
    let new: New = unsafe { function(library, "farside_options_new") };
    // SAFETY: likewise.
    let set_server: Set = unsafe { function(library, "farside_options_server") };
    // SAFETY: likewise.
    let connect: Open = unsafe { function(library, "farside_connect") };
    // SAFETY: likewise.
    let open_session: Open = unsafe { function(library, "farside_session_open") };
    // SAFETY: likewise.
    let get: Get = unsafe { function(library, "farside_get") };

    let (mut client, mut session) = (std::ptr::null_mut(), std::ptr::null_mut());
    // SAFETY: it has no arguments.
    let options = unsafe { new() };
    // SAFETY: all pointers are valid.
    assert_eq!(unsafe { set_server(options, server.as_ptr()) }, 0);
    // SAFETY: likewise.
    assert_eq!(unsafe { connect(options, &mut client) }, 0);
    // SAFETY: likewise.
    assert_eq!(unsafe { open_session(client, &mut session) }, 0);
    (get, session)
}

/// Nanoseconds of one GET, on average of a turn.
fn turn(mut get: impl FnMut(&[u8], &mut [u8; 64])) -> f64 {
    let mut value = [0; 64];
    let started = Instant::now();
    for n in 0..GETS_PER_TURN {
        get(&(n * 7919 % KEYS).to_le_bytes(), &mut value);
        assert_eq!(value[0], 7);
    }
    started.elapsed().as_nanos() as f64 / GETS_PER_TURN as f64
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let [_, server, library, ..] = &arguments[..] else {
        panic!("usage: get-from-c SERVER LIBRARY")
    };
    let client = farside::Client::builder().server(server).connect().unwrap();
    let mut session = client.session().unwrap();
    (0..KEYS).for_each(|key| session.put(key.to_le_bytes(), [7; 64]).unwrap());
    let (get, c_session) = open(library, server);

    let mut in_rust = |key: &[u8], value: &mut [u8; 64]| {
        assert_eq!(session.get_into(key, &mut value[..]).unwrap().unwrap().bytes, 64);
    };
    let in_c = |key: &[u8], value: &mut [u8; 64]| {
        let (mut bytes, mut version) = (0, 0);
        let (key, key_bytes, value) = (key.as_ptr().cast(), key.len(), value.as_mut_ptr().cast());
        // SAFETY: all pointers are valid.
        let status = unsafe { get(c_session, key, key_bytes, value, 64, &mut bytes, &mut version) };
        assert_eq!((status, bytes), (0, 64));
    };
    let (mut rust_turns, mut c_turns) = (Vec::new(), Vec::new());
    for _ in 0..TURNS {
        rust_turns.push(turn(&mut in_rust));
        c_turns.push(turn(in_c));
    }
    let ratios = rust_turns.iter().zip(&c_turns).map(|(rust, c)| c / rust).collect();
    let (rust, c, ratio) = (median(rust_turns), median(c_turns), median(ratios));
    println!("GET of 64 bytes: Rust {rust:.0} ns, C {c:.0} ns, C / Rust {ratio:.3}");
}
