//! The policy for connecting, which every command and every call follows.
//!
//! A client makes attempts with growing pauses until the timeout. The last attempt begins exactly
//! at the timeout. The error says how far it came.

use std::fmt;
use std::time::{Duration, Instant};

use farside_fabric::interrupt;

use super::{Attached, ConnectError, ConnectOptions, Result};

/// How long connecting may take, unless the user says so.
pub const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
/// How long a server that accepts connections may take to answer, unless the user says how long
/// connecting may take. A server accepts connections before it has made its region.
pub const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);
/// The first pause between two attempts. Each next one is twice as long.
const PAUSE_MIN: Duration = Duration::from_millis(5);
/// The longest pause, and so the longest delay before a restarted server is found.
const PAUSE_MAX: Duration = Duration::from_millis(250);
/// The shortest timeout of an attempt. The last attempt gets it, because it begins when no time is
/// left.
pub(super) const ATTEMPT_TIMEOUT_MIN: Duration = Duration::from_millis(50);

/// How far an attempt to reach a server came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Contact {
    /// No server answers at the address.
    None,
    /// The server accepted the connection but sent no answer: it still starts, is stopped or is
    /// overloaded.
    Silent,
    /// The server accepted the connection and closed it without an answer.
    HungUp,
    /// The server answered before, and has stopped answering.
    Lost,
    /// The shard of the cluster has no server, so there is no address.
    Unassigned,
}

impl Contact {
    /// Returns this contact as it is for a client that the server has answered before.
    pub(super) fn after_an_answer(self) -> Self {
        if matches!(self, Self::Silent | Self::Unassigned) { self } else { Self::Lost }
    }

    /// Returns the error message. `tried` is the time since the first attempt began.
    pub fn message(self, server: &str, tried: Duration) -> impl fmt::Display {
        let ms = tried.as_millis();
        fmt::from_fn(move |f| match self {
            Self::None => write!(
                f,
                "no server answers at {server} (tried for {ms} ms): is kv-server running there?"
            ),
            Self::Silent => write!(
                f,
                "the server at {server} accepted the connection, but did not answer within {ms} \
                 ms: it is still starting, stopped or overloaded"
            ),
            Self::HungUp => write!(
                f,
                "the server at {server} accepted the connection and closed it without an answer \
                 (tried for {ms} ms): its log says why"
            ),
            Self::Lost => write!(
                f,
                "the server at {server} answered, then went away (tried for {ms} ms): is it \
                 running again?"
            ),
            Self::Unassigned => write!(
                f,
                "it has no server at present (tried for {ms} ms): start one of the cluster, which \
                 takes it"
            ),
        })
    }
}

/// The schedule of attempts.
pub struct Attempts {
    timeout: Duration,
    pause: Duration,
}

impl Attempts {
    /// A schedule with this timeout.
    pub fn within(timeout: Duration) -> Self {
        Self { timeout, pause: PAUSE_MIN }
    }

    /// Changes the timeout, which began with the first attempt.
    pub fn set_timeout(&mut self, timeout: Duration) {
        self.timeout = timeout;
    }

    /// Returns the pause after an attempt that failed. `elapsed` is the time since the first
    /// attempt began. `None` if the last attempt was made, or the caller has given
    /// up.
    pub fn pause_after(&mut self, elapsed: Duration) -> Option<Duration> {
        let left = self.timeout.checked_sub(elapsed).filter(|left| !left.is_zero())?;
        if interrupt::is_given_up() {
            return None;
        }
        let pause = self.pause.min(left);
        self.pause = (self.pause * 2).min(PAUSE_MAX);
        Some(pause)
    }
}

impl ConnectOptions {
    /// The time within which attempts follow one that came so far.
    pub fn timeout_after(&self, contact: Contact) -> Duration {
        match contact {
            Contact::Silent => self.answer_timeout.max(self.timeout),
            _ => self.timeout,
        }
    }

    /// Connects, with as many attempts as the timeout allows.
    ///
    /// # Errors
    /// [`ConnectError`]. A [`ConnectError::Unreachable`] has the whole time since the call.
    pub fn connect(&self) -> Result<Attached> {
        let started = Instant::now();
        let mut attempts = Attempts::within(self.timeout);
        loop {
            let left = attempts.timeout.saturating_sub(started.elapsed());
            let (server, contact, source) = match self.attach(left.max(ATTEMPT_TIMEOUT_MIN)) {
                Err(ConnectError::Unreachable { server, contact, source, .. }) => {
                    (server, contact, source)
                }
                attached => return attached,
            };
            let tried = started.elapsed();
            if contact == Contact::Silent && attempts.timeout < self.answer_timeout {
                let (ms, at_most) = (tried.as_millis(), self.answer_timeout.as_secs());
                tracing::warn!(
                    "{server} accepted the connection, but has not answered for {ms} ms: it is \
                     still starting, stopped or overloaded. Waiting for {at_most} s at most"
                );
            }
            attempts.set_timeout(self.timeout_after(contact));
            let Some(pause) = attempts.pause_after(tried) else {
                return Err(ConnectError::Unreachable { server, contact, tried, source });
            };
            interrupt::sleep(pause);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attempts_use_the_whole_timeout() {
        for timeout_ms in [1, 7, 1000, 3000] {
            let timeout = Duration::from_millis(timeout_ms);
            let (mut attempts, mut elapsed) = (Attempts::within(timeout), Duration::ZERO);
            while let Some(pause) = attempts.pause_after(elapsed) {
                assert!(!pause.is_zero() && pause <= PAUSE_MAX, "{pause:?}");
                elapsed += pause;
            }
            // The last attempt began exactly at the timeout.
            assert_eq!(elapsed, timeout);
        }
        // One attempt took all the time.
        assert_eq!(Attempts::within(PAUSE_MAX).pause_after(PAUSE_MAX * 2), None);
    }

    #[test]
    fn the_message_says_how_far_the_last_attempt_came() {
        let message = |contact: Contact| {
            contact.message("shm:///run/kv.sock", Duration::from_millis(1000)).to_string()
        };
        for (contact, part) in [
            (Contact::None, "no server answers at shm:///run/kv.sock (tried for 1000 ms)"),
            (Contact::Silent, "accepted the connection, but did not answer within 1000 ms"),
            (Contact::HungUp, "closed it without an answer (tried for 1000 ms)"),
            (Contact::Lost, "answered, then went away (tried for 1000 ms)"),
            (Contact::Unassigned, "it has no server at present (tried for 1000 ms): start one"),
        ] {
            assert!(message(contact).contains(part), "{}", message(contact));
        }
        assert_eq!(Contact::None.after_an_answer(), Contact::Lost);
        assert_eq!(Contact::Silent.after_an_answer(), Contact::Silent);
        assert_eq!(Contact::Unassigned.after_an_answer(), Contact::Unassigned);
    }
}
