//! Names of hosts. A server listens at a name that may have several addresses. The system's lookup
//! has a timeout of its own, of ten seconds and more. So it runs in a thread, and the caller waits
//! for it until its own deadline.

use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use std::{fmt, io};

use farside_fabric::interrupt;
use rustix::io::Errno;

/// Why a program can listen at none of a host's addresses, or not at one that this host has.
#[derive(Debug)]
pub struct ListenError {
    /// The addresses that were tried, with their errors. The last one decides.
    tried: Vec<(SocketAddr, io::Error)>,
}

impl ListenError {
    /// The kind of the decisive error; `NotFound` if the host has no address.
    pub fn kind(&self) -> io::ErrorKind {
        self.tried.last().map_or(io::ErrorKind::NotFound, |(_, error)| error.kind())
    }
}

impl fmt::Display for ListenError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.tried.is_empty() {
            return f.write_str("the host has no address");
        }
        for (at, (address, error)) in self.tried.iter().enumerate() {
            let separator = if at == 0 { "" } else { "; " };
            write!(f, "{separator}{address}: {error}")?;
        }
        Ok(())
    }
}

impl std::error::Error for ListenError {}

/// Binds a socket to each of a host's addresses that this host has. A name such as `localhost` may
/// have an IPv6 address where the system has no IPv6.
///
/// # Errors
/// [`ListenError`] if this host has none of the addresses, or one of them cannot be bound.
pub fn bind_each<T>(
    addresses: &[SocketAddr],
    mut bind: impl FnMut(SocketAddr) -> io::Result<T>,
) -> Result<Vec<T>, ListenError> {
    let (mut bound, mut tried) = (Vec::new(), Vec::new());
    for &address in addresses {
        match bind(address) {
            Ok(socket) => bound.push(socket),
            Err(error) => {
                let is_lacking = is_lacking(&error);
                tried.push((address, error));
                if !is_lacking {
                    return Err(ListenError { tried });
                }
            }
        }
    }
    if bound.is_empty() {
        return Err(ListenError { tried });
    }
    for (address, error) in tried {
        tracing::info!(%address, "does not listen at an address that this host lacks: {error}");
    }
    Ok(bound)
}

/// Whether this host lacks the address, or its family.
fn is_lacking(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::AddrNotAvailable
        || Errno::from_io_error(error) == Some(Errno::AFNOSUPPORT)
}

/// Limit on the names that are looked up at the same time.
const LOOKUPS_MAX: usize = 16;

/// The system's lookup.
pub(crate) static SYSTEM: Resolver =
    Resolver::new(|host| Ok((host, 0).to_socket_addrs()?.collect()));

/// Looks up a name. The port of the addresses has no meaning.
type Lookup = fn(&str) -> io::Result<Vec<SocketAddr>>;
/// The addresses, or the kind and the text of the error.
type Answer = Result<Vec<SocketAddr>, (io::ErrorKind, String)>;

/// Looks up names in threads, one for each name.
pub(crate) struct Resolver {
    lookup: Lookup,
    /// The names that are being looked up, and those who wait.
    under_way: Mutex<Vec<(String, Arc<Pending>)>>,
}

/// The answer of a thread, for all that wait for it.
#[derive(Default)]
struct Pending {
    answer: Mutex<Option<Answer>>,
    answered: Condvar,
}

impl Pending {
    /// Waits for the answer. `None` if there is none in time, or if the caller gives up.
    fn wait(&self, timeout: Duration) -> Option<Answer> {
        let started = Instant::now();
        loop {
            let left = timeout.saturating_sub(started.elapsed());
            let (answer, step) = (lock(&self.answer), interrupt::step(left));
            let waited = self.answered.wait_timeout_while(answer, step, |answer| answer.is_none());
            let answer = waited.unwrap_or_else(PoisonError::into_inner).0.clone();
            if answer.is_some() || left.is_zero() || interrupt::gives_up() {
                return answer;
            }
        }
    }
}

impl Resolver {
    pub(crate) const fn new(lookup: Lookup) -> Self {
        Self { lookup, under_way: Mutex::new(Vec::new()) }
    }

    /// Returns the addresses of a host, each once. A numeric address needs no lookup.
    ///
    /// # Errors
    /// `TimedOut` if there is no answer in time. Then the lookup goes on for a later call.
    /// `QuotaExceeded` while too many other lookups have no answer. Otherwise the system's error.
    pub(crate) fn resolve(
        &'static self,
        host: &str,
        port: u16,
        timeout: Duration,
    ) -> io::Result<Vec<SocketAddr>> {
        if let Ok(address) = host.parse::<IpAddr>() {
            return Ok(vec![SocketAddr::new(address, port)]);
        }
        let found = match self.begin(host)?.wait(timeout) {
            Some(Ok(found)) => found,
            Some(Err((kind, text))) => return Err(io::Error::new(kind, text)),
            None => {
                let why = format!("no name server has told the address of {host} in time");
                return Err(io::Error::new(io::ErrorKind::TimedOut, why));
            }
        };
        let mut addresses: Vec<SocketAddr> = Vec::new();
        for mut address in found {
            address.set_port(port);
            if !addresses.contains(&address) {
                addresses.push(address);
            }
        }
        Ok(addresses)
    }

    /// Returns the lookup of this name that is under way, or begins one.
    fn begin(&'static self, host: &str) -> io::Result<Arc<Pending>> {
        let mut under_way = lock(&self.under_way);
        if let Some((_, pending)) = under_way.iter().find(|(name, _)| name == host) {
            return Ok(pending.clone());
        }
        if under_way.len() >= LOOKUPS_MAX {
            let why = format!(
                "{LOOKUPS_MAX} lookups of other names have no answer yet: does the name server \
                 answer?"
            );
            return Err(io::Error::new(io::ErrorKind::QuotaExceeded, why));
        }
        let pending = Arc::<Pending>::default();
        let (name, answered) = (host.to_owned(), pending.clone());
        std::thread::Builder::new().name("farside-lookup".into()).spawn(move || {
            let found = (self.lookup)(&name).map_err(|error| (error.kind(), error.to_string()));
            *lock(&answered.answer) = Some(found);
            answered.answered.notify_all();
            // Those that come later ask again.
            lock(&self.under_way).retain(|(other, _)| *other != name);
        })?;
        under_way.push((host.to_owned(), pending.clone()));
        Ok(pending)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Poisoning is ignored: each critical section leaves a valid state.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    /// Binds to addresses as a host would on which these calls fail.
    fn bind(fail: &[(&str, Errno)]) -> Result<Vec<SocketAddr>, ListenError> {
        let addresses = ["[::1]:7400", "127.0.0.1:7400", "10.9.0.1:7400"];
        let addresses = addresses.map(|address| address.parse().unwrap());
        bind_each(&addresses, |address| {
            match fail.iter().find(|(failing, _)| *failing == address.to_string()) {
                Some((_, errno)) => Err(io::Error::from(*errno)),
                None => Ok(address),
            }
        })
    }

    #[test]
    fn a_host_without_a_family_listens_at_its_other_addresses() {
        for errno in [Errno::ADDRNOTAVAIL, Errno::AFNOSUPPORT] {
            let bound = bind(&[("[::1]:7400", errno)]).unwrap();
            assert_eq!(bound, ["127.0.0.1:7400", "10.9.0.1:7400"].map(|a| a.parse().unwrap()));
        }
    }

    #[test]
    fn the_error_names_each_address() {
        let lacking = |address| (address, Errno::ADDRNOTAVAIL);
        let all = ["[::1]:7400", "127.0.0.1:7400", "10.9.0.1:7400"];
        let error = bind(&all.map(lacking)).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::AddrNotAvailable);
        assert!(all.iter().all(|address| error.to_string().contains(address)), "{error}");
        // Another program listens at one of them: it would get clients of this one.
        let error = bind(&[lacking(all[0]), (all[1], Errno::ADDRINUSE)]).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
        assert!(error.to_string().contains("127.0.0.1:7400: "), "{error}");
        assert_eq!(bind_each(&[], |_| Ok(())).unwrap_err().kind(), io::ErrorKind::NotFound);
    }

    const SHORT: Duration = Duration::from_millis(1);
    const LONG: Duration = Duration::from_secs(60);

    /// The lookups without an answer.
    static LOOKUPS: AtomicUsize = AtomicUsize::new(0);

    /// The lookup with a name server that answers for the host `good` only.
    fn silent(host: &str) -> io::Result<Vec<SocketAddr>> {
        if host == "good" {
            let twice = ["[::1]:0", "127.0.0.1:0", "127.0.0.1:0"];
            return Ok(twice.map(|address| address.parse().unwrap()).into());
        }
        LOOKUPS.fetch_add(1, Ordering::Relaxed);
        loop {
            std::thread::park();
        }
    }

    /// Fails if a lookup is made in the caller's thread, which would wait without end.
    #[test]
    fn a_silent_name_server_holds_no_caller_beyond_its_deadline() {
        static RESOLVER: Resolver = Resolver::new(silent);
        for _ in 0..10 * LOOKUPS_MAX {
            let error = RESOLVER.resolve("kv-1", 7400, SHORT).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::TimedOut);
            assert!(error.to_string().contains("kv-1"), "{error}");
        }
        // Names have a thread each, and their number is limited.
        let kinds = (2..2 * LOOKUPS_MAX).map(|number| {
            RESOLVER.resolve(&format!("kv-{number}"), 7400, SHORT).unwrap_err().kind()
        });
        let kinds: Vec<_> = kinds.collect();
        assert_eq!(kinds[..LOOKUPS_MAX - 1], [io::ErrorKind::TimedOut; LOOKUPS_MAX - 1]);
        assert!(kinds[LOOKUPS_MAX - 1..].iter().all(|kind| *kind == io::ErrorKind::QuotaExceeded));
        assert!(LOOKUPS.load(Ordering::Relaxed) <= LOOKUPS_MAX);
        // A numeric address needs no name server.
        let numeric = RESOLVER.resolve("::1", 7400, Duration::ZERO).unwrap();
        assert_eq!(numeric, ["[::1]:7400".parse().unwrap()]);
    }

    #[test]
    fn a_host_has_each_address_once() {
        static RESOLVER: Resolver = Resolver::new(silent);
        for _ in 0..2 * LOOKUPS_MAX {
            let found = RESOLVER.resolve("good", 7400, LONG).unwrap();
            assert_eq!(found, ["[::1]:7400", "127.0.0.1:7400"].map(|a| a.parse().unwrap()));
        }
    }

    /// The next attempt of a client uses the answer that came too late for the one before.
    #[test]
    fn a_lookup_that_takes_long_answers_a_later_call() {
        static RELEASE: Mutex<bool> = Mutex::new(false);
        static RESOLVER: Resolver = Resolver::new(|_| {
            while !*lock(&RELEASE) {
                std::thread::sleep(SHORT);
            }
            Ok(vec!["10.9.0.1:0".parse().unwrap()])
        });
        assert!(RESOLVER.resolve("late", 7400, SHORT).is_err());
        *lock(&RELEASE) = true;
        let found = RESOLVER.resolve("late", 7400, LONG).unwrap();
        assert_eq!(found, ["10.9.0.1:7400".parse().unwrap()]);
    }
}
