//! Requests to etcd's members through their JSON gateway.
//!
//! A request goes to the member that answered last. If that one does not answer in time, it goes to
//! the next: a stopped process accepts connections, too, so only a deadline finds it. Every call
//! has a deadline for all its requests.
//!
//! The JSON has protocol buffers in their JSON form. Keys and values are in base64, numbers of 64
//! bits are texts, and fields with their default value are left out.

use std::io::{BufRead, BufReader};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use data_encoding::BASE64;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer};
use serde_json::{Value, json};
use ureq::http::Response;
use ureq::{Agent, Body, Timeout};

use crate::store::{Revision, StoreError, StoreOptions};

/// The longest time to find a member's address, and then to connect to it.
const CONNECT_MAX: Duration = Duration::from_millis(300);
/// The longest time for a request and its answer.
const REQUEST_MAX: Duration = Duration::from_secs(1);
/// The longest time for all requests of a call.
const CALL_MAX: Duration = Duration::from_secs(3);
/// The pause after all members have failed, so that a new leader can be elected.
const ROUND_PAUSE: Duration = Duration::from_millis(100);
/// The longest answer.
const BODY_BYTES_MAX: u64 = 8 << 20;
/// The characters of an answer that an error message has at most.
const QUOTED_MAX: usize = 200;

/// How to end a lack of space.
pub(super) const FREE_SPACE: &str = "compact etcd's history, defragment every member or raise \
    --quota-backend-bytes, then run: etcdctl alarm disarm";

/// gRPC's status codes of errors that concern more than one request.
const DEADLINE_EXCEEDED: i64 = 4;
const NOT_FOUND: i64 = 5;
const PERMISSION_DENIED: i64 = 7;
const UNAVAILABLE: i64 = 14;
const UNAUTHENTICATED: i64 = 16;

/// Whether a request may be done twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Repeat {
    /// It has the same effect twice.
    Harmless,
    /// It is repeated only if it was certainly not done.
    IfUndone,
}

/// Why a request failed at one member.
#[derive(Debug)]
pub(super) enum Failure {
    /// The member did not answer, or cannot serve now. `is_undone` if nothing can have changed.
    Unavailable { why: String, is_undone: bool },
    /// The token has ended, or the users have changed.
    Token,
    /// There is no such lease.
    NoLease,
    /// The revision was compacted.
    Compacted,
    /// Any other.
    Final(StoreError),
}

/// What an answer is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Answer {
    /// A message, which has to be complete in time.
    Whole,
    /// A stream, which has to begin in time and then lasts until the deadline.
    Stream,
}

type Result<T> = std::result::Result<T, StoreError>;
type Attempt<T> = std::result::Result<T, Failure>;

/// What is known of the authentication.
#[derive(Clone, PartialEq, Eq)]
enum Login {
    /// Not logged in.
    Missing,
    /// etcd has no authentication.
    Needless,
    Token(String),
}

/// The members of an etcd cluster. It has a password, so it has no Debug form.
pub(super) struct Gateway {
    uri: String,
    /// `http://HOST:PORT` of each member.
    endpoints: Vec<String>,
    /// The index of the endpoint that answered last.
    current: AtomicUsize,
    agent: Agent,
    user: Option<(String, String)>,
    login: Mutex<Login>,
}

impl Gateway {
    /// The members at these hosts with ports.
    pub(super) fn new(uri: &str, hosts: &[&str], options: &StoreOptions) -> Result<Self> {
        let failed = |why: String| StoreError::Failed { uri: uri.to_owned(), why };
        let user = match (&options.user, &options.password) {
            (None, None) => None,
            (Some(user), Some(password)) => Some((user.clone(), password.0.clone())),
            _ => return Err(failed("`user` and `password` need each other: set both".into())),
        };
        let mut config = Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .proxy(None)
            .timeout_resolve(Some(CONNECT_MAX))
            .timeout_connect(Some(CONNECT_MAX))
            .timeout_send_request(Some(REQUEST_MAX))
            .timeout_send_body(Some(REQUEST_MAX))
            .timeout_recv_response(Some(REQUEST_MAX));
        if options.tls.is_used() {
            config = config.tls_config(super::tls_config(&options.tls).map_err(failed)?);
        }
        let scheme = if options.tls.is_used() { "https" } else { "http" };
        Ok(Self {
            uri: uri.to_owned(),
            endpoints: hosts.iter().map(|host| format!("{scheme}://{host}")).collect(),
            current: AtomicUsize::new(0),
            agent: config.build().new_agent(),
            user,
            login: Mutex::new(Login::Missing),
        })
    }

    pub(super) fn endpoints(&self) -> &[String] {
        &self.endpoints
    }

    /// The error for an answer that no etcd gives, or a refusal without a name of its own.
    pub(super) fn failed(&self, why: impl Into<String>) -> StoreError {
        StoreError::Failed { uri: self.uri.clone(), why: why.into() }
    }

    fn unreachable(&self, why: String) -> StoreError {
        StoreError::Unreachable { uri: self.uri.clone(), why }
    }

    /// The error of a failure that the caller does not expect.
    pub(super) fn unexpected(&self, failure: Failure) -> StoreError {
        match failure {
            Failure::Unavailable { why, .. } => self.unreachable(why),
            Failure::Token => self.denied("it does not accept the token that it has just given"),
            Failure::NoLease => self.failed("it has lost a lease"),
            Failure::Compacted => self.failed("it was compacted again and again"),
            Failure::Final(error) => error,
        }
    }

    fn denied(&self, why: impl Into<String>) -> StoreError {
        StoreError::Denied { uri: self.uri.clone(), why: why.into() }
    }

    /// Sends a request to one member after another until one answers it, for at most
    /// [`CALL_MAX`].
    pub(super) fn call<T: DeserializeOwned>(
        &self,
        path: &str,
        body: &Value,
        repeat: Repeat,
    ) -> Attempt<T> {
        let deadline = Instant::now() + CALL_MAX;
        self.at_each(deadline, repeat, |endpoint| self.call_one(endpoint, path, body, deadline))
    }

    /// Like [`Self::call`], for a request whose answer is the first message of a stream.
    pub(super) fn call_stream<T: DeserializeOwned>(&self, path: &str, body: &Value) -> Attempt<T> {
        let deadline = Instant::now() + CALL_MAX;
        self.at_each(deadline, Repeat::Harmless, |endpoint| {
            self.result(endpoint, self.call_one(endpoint, path, body, deadline)?)
        })
    }

    /// Makes attempts at one member after another until one succeeds or the deadline has passed.
    fn at_each<T>(
        &self,
        deadline: Instant,
        repeat: Repeat,
        mut attempt: impl FnMut(usize) -> Attempt<T>,
    ) -> Attempt<T> {
        let mut count = 0;
        loop {
            count += 1;
            let endpoint = self.current.load(Ordering::Relaxed) % self.endpoints.len();
            let failure = match attempt(endpoint) {
                Ok(answer) => return Ok(answer),
                Err(failure) => failure,
            };
            // The next call does not begin with a member that gives damaged answers, either.
            if matches!(failure, Failure::Unavailable { .. } | Failure::Final(_)) {
                // Fails if another call has already gone on to the next.
                let _ = self.current.compare_exchange(
                    endpoint,
                    (endpoint + 1) % self.endpoints.len(),
                    Ordering::Relaxed,
                    Ordering::Relaxed,
                );
            }
            let Failure::Unavailable { why, is_undone } = failure else { return Err(failure) };
            tracing::debug!(endpoint = self.endpoints[endpoint], why, "a member of etcd failed");
            let is_round = count % self.endpoints.len() == 0;
            let pause = if is_round { ROUND_PAUSE } else { Duration::ZERO };
            let may_repeat = repeat == Repeat::Harmless || is_undone;
            if !may_repeat || Instant::now() + pause >= deadline {
                return Err(Failure::Unavailable { why, is_undone });
            }
            thread::sleep(pause);
        }
    }

    /// Sends a request to one member.
    pub(super) fn call_one<T: DeserializeOwned>(
        &self,
        endpoint: usize,
        path: &str,
        body: &Value,
        deadline: Instant,
    ) -> Attempt<T> {
        let response = self.send_as_user(endpoint, path, body, deadline, Answer::Whole)?;
        let answer = self.body(endpoint, response)?;
        self.decode(endpoint, &answer)
    }

    /// Passes each message of a stream to `each`, until that returns a result or the deadline has
    /// passed. Returns `None` after the deadline, and if the member ends the stream.
    pub(super) fn watch<T: DeserializeOwned, R>(
        &self,
        path: &str,
        body: &Value,
        deadline: Instant,
        mut each: impl FnMut(T) -> Attempt<Option<R>>,
    ) -> Attempt<Option<R>> {
        self.at_each(deadline, Repeat::Harmless, |endpoint| {
            let response = self.send_as_user(endpoint, path, body, deadline, Answer::Stream)?;
            let reader = response.into_body().into_with_config().limit(BODY_BYTES_MAX).reader();
            let mut lines = BufReader::new(reader).split(b'\n');
            // A member that ends the stream without a message has failed.
            let mut has_begun = false;
            loop {
                let line = match lines.next() {
                    Some(Ok(line)) => line,
                    None if has_begun => return Ok(None),
                    None => return Err(self.unavailable(endpoint, "it ended the stream", true)),
                    Some(Err(error)) => match ureq::Error::from(error) {
                        ureq::Error::Timeout(_) => return Ok(None),
                        _ if has_begun => return Ok(None),
                        error => return Err(self.body_failure(endpoint, &error)),
                    },
                };
                has_begun = true;
                let message: Streamed<T> = self.decode(endpoint, &line)?;
                if let Some(result) = each(self.result(endpoint, message)?)? {
                    return Ok(Some(result));
                }
            }
        })
    }

    /// The message in an item of a stream.
    fn result<T>(&self, endpoint: usize, item: Streamed<T>) -> Attempt<T> {
        match item {
            Streamed { error: Some(refusal), .. } => Err(self.refusal(endpoint, &refusal)),
            Streamed { result: Some(result), .. } => Ok(result),
            _ => Err(self.damaged(endpoint, "the stream has an empty message")),
        }
    }

    /// Sends a request with a token, if there is a user. Logs in again once if the token has ended.
    fn send_as_user(
        &self,
        endpoint: usize,
        path: &str,
        body: &Value,
        deadline: Instant,
        kind: Answer,
    ) -> Attempt<Response<Body>> {
        let login = self.login(endpoint, deadline)?;
        match self.send(endpoint, path, body, &login, deadline, kind) {
            Err(Failure::Token) if self.user.is_some() => {
                self.forget(&login);
                let login = self.login(endpoint, deadline)?;
                self.send(endpoint, path, body, &login, deadline, kind)
            }
            sent => sent,
        }
    }

    fn send(
        &self,
        endpoint: usize,
        path: &str,
        body: &Value,
        login: &Login,
        deadline: Instant,
        kind: Answer,
    ) -> Attempt<Response<Body>> {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(self.unavailable(endpoint, "the deadline has passed", true));
        }
        let mut request = self
            .agent
            .post(format!("{}/v3/{path}", self.endpoints[endpoint]))
            .header("Content-Type", "application/json")
            .config();
        request = match kind {
            Answer::Whole => request.timeout_global(Some(left.min(REQUEST_MAX))),
            Answer::Stream => request.timeout_recv_body(Some(left)),
        };
        let mut request = request.build();
        if let Login::Token(token) = login {
            request = request.header("Authorization", token);
        }
        let sent = request.send(&body.to_string().into_bytes()[..]);
        let response = sent.map_err(|error| self.send_failure(endpoint, &error))?;
        if response.status().is_success() {
            return Ok(response);
        }
        let status = response.status().as_u16();
        let answer = self.body(endpoint, response)?;
        match serde_json::from_slice::<Refusal>(&answer) {
            Ok(refusal) if !refusal.message.is_empty() => Err(self.refusal(endpoint, &refusal)),
            _ => {
                let why = format!("HTTP status {status}, {}", quote(&answer));
                Err(self.damaged(endpoint, &why))
            }
        }
    }

    fn login(&self, endpoint: usize, deadline: Instant) -> Attempt<Login> {
        let Some((name, password)) = &self.user else { return Ok(Login::Needless) };
        let known = self.login.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if known != Login::Missing {
            return Ok(known);
        }
        let body = json!({ "name": name, "password": password });
        let path = "auth/authenticate";
        let sent = self.send(endpoint, path, &body, &Login::Needless, deadline, Answer::Whole);
        let login = match sent {
            Ok(response) => {
                let answer = self.body(endpoint, response)?;
                Login::Token(self.decode::<Token>(endpoint, &answer)?.token)
            }
            Err(Failure::Final(StoreError::Failed { why, .. }))
                if why.contains("authentication is not enabled") =>
            {
                Login::Needless
            }
            // Nothing but a login was tried.
            Err(Failure::Unavailable { why, .. }) => {
                return Err(Failure::Unavailable { why, is_undone: true });
            }
            Err(failure) => return Err(failure),
        };
        *self.login.lock().unwrap_or_else(PoisonError::into_inner) = login.clone();
        Ok(login)
    }

    /// Forgets this login, unless another call has already replaced it.
    fn forget(&self, login: &Login) {
        let mut known = self.login.lock().unwrap_or_else(PoisonError::into_inner);
        if *known == *login {
            *known = Login::Missing;
        }
    }

    fn decode<T: DeserializeOwned>(&self, endpoint: usize, answer: &[u8]) -> Attempt<T> {
        serde_json::from_slice(answer).map_err(|error| {
            self.damaged(endpoint, &format!("{error} in the answer {}", quote(answer)))
        })
    }

    fn unavailable(&self, endpoint: usize, why: &str, is_undone: bool) -> Failure {
        let why = format!("{}: {why}", self.endpoints[endpoint]);
        Failure::Unavailable { why, is_undone }
    }

    fn damaged(&self, endpoint: usize, why: &str) -> Failure {
        let endpoint = &self.endpoints[endpoint];
        let why = format!("{endpoint} does not answer like etcd 3.4 or a later one: {why}");
        Failure::Final(self.failed(why))
    }

    fn send_failure(&self, endpoint: usize, error: &ureq::Error) -> Failure {
        use std::io::ErrorKind::{ConnectionRefused, HostUnreachable, NetworkUnreachable};
        let is_undone = match error {
            ureq::Error::HostNotFound | ureq::Error::ConnectionFailed => true,
            ureq::Error::Timeout(Timeout::Resolve | Timeout::Connect) => true,
            ureq::Error::Io(error) => {
                [ConnectionRefused, HostUnreachable, NetworkUnreachable].contains(&error.kind())
            }
            _ => false,
        };
        match error {
            ureq::Error::Timeout(Timeout::Resolve | Timeout::Connect) => {
                self.unavailable(endpoint, "no connection in time", is_undone)
            }
            ureq::Error::Timeout(_) => self.unavailable(endpoint, "no answer in time", is_undone),
            ureq::Error::Protocol(_) | ureq::Error::LargeResponseHeader(..) => {
                self.damaged(endpoint, &error.to_string())
            }
            error => self.unavailable(endpoint, &error.to_string(), is_undone),
        }
    }

    /// Receives the whole answer.
    fn body(&self, endpoint: usize, response: Response<Body>) -> Attempt<Vec<u8>> {
        let body = response.into_body().into_with_config().limit(BODY_BYTES_MAX);
        body.read_to_vec().map_err(|error| self.body_failure(endpoint, &error))
    }

    fn body_failure(&self, endpoint: usize, error: &ureq::Error) -> Failure {
        match error {
            ureq::Error::BodyExceedsLimit(_) => self.damaged(endpoint, "the answer is too long"),
            error => self.send_failure(endpoint, error),
        }
    }

    /// The failure that etcd's error is.
    fn refusal(&self, endpoint: usize, refusal: &Refusal) -> Failure {
        let Refusal { code, message } = refusal;
        let has = |text: &str| message.contains(text);
        // These change nothing: etcd refused them before the other members learnt of them.
        let is_undone = ["no leader", "proposal dropped", "too many requests"];
        let is_undone = is_undone.into_iter().any(has);
        if has("invalid auth token") || has("auth store is old") || *code == UNAUTHENTICATED {
            Failure::Token
        } else if has("user name is empty") {
            match self.user {
                Some(_) => Failure::Token,
                None => Failure::Final(self.denied("it wants a user; set `user` and `password`")),
            }
        } else if *code == PERMISSION_DENIED || has("authentication failed") {
            Failure::Final(self.denied(message))
        } else if has("database space exceeded") {
            let why = format!("{message}; {}", FREE_SPACE);
            Failure::Final(StoreError::NoSpace { uri: self.uri.clone(), why })
        } else if has("revision has been compacted") {
            Failure::Compacted
        } else if *code == NOT_FOUND && has("lease") {
            Failure::NoLease
        } else if is_undone || [DEADLINE_EXCEEDED, UNAVAILABLE].contains(code) {
            self.unavailable(endpoint, message, is_undone)
        } else {
            let endpoint = &self.endpoints[endpoint];
            Failure::Final(self.failed(format!("{endpoint}: {message}")))
        }
    }
}

/// The begin of an answer, for an error message.
fn quote(answer: &[u8]) -> String {
    let text = String::from_utf8_lossy(answer);
    format!("{:?}", text.chars().take(QUOTED_MAX).collect::<String>())
}

/// Returns the base64 of a key or a value.
pub(super) fn base64(bytes: impl AsRef<[u8]>) -> String {
    BASE64.encode(bytes.as_ref())
}

/// Reads base64.
fn bytes<'de, D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Vec<u8>, D::Error> {
    let text = String::deserialize(deserializer)?;
    BASE64.decode(text.as_bytes()).map_err(serde::de::Error::custom)
}

/// Reads a number of 64 bits.
fn number<'de, D: Deserializer<'de>>(deserializer: D) -> std::result::Result<u64, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Form {
        Number(u64),
        Text(String),
    }
    match Form::deserialize(deserializer)? {
        Form::Number(number) => Ok(number),
        Form::Text(text) => text.parse().map_err(serde::de::Error::custom),
    }
}

/// What every answer begins with.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Header {
    #[serde(deserialize_with = "number")]
    pub(super) revision: Revision,
    #[serde(deserialize_with = "number")]
    pub(super) member_id: u64,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct KeyValue {
    #[serde(deserialize_with = "bytes")]
    pub(super) key: Vec<u8>,
    #[serde(deserialize_with = "number")]
    pub(super) mod_revision: Revision,
    #[serde(deserialize_with = "bytes")]
    pub(super) value: Vec<u8>,
}

/// An answer in which every field but the header is missing if it has its default value.
#[derive(Debug, Deserialize)]
pub(super) struct Range {
    pub(super) header: Header,
    #[serde(default)]
    pub(super) kvs: Vec<KeyValue>,
    #[serde(default)]
    pub(super) more: bool,
}

#[derive(Debug, Deserialize)]
pub(super) struct Txn {
    /// Only required: its absence shows that this is no answer of etcd.
    #[serde(rename = "header")]
    _header: Header,
    #[serde(default)]
    pub(super) succeeded: bool,
}

#[derive(Debug, Deserialize)]
pub(super) struct Put {
    #[serde(rename = "header")]
    _header: Header,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Lease {
    #[serde(rename = "ID", deserialize_with = "number")]
    pub(super) id: u64,
    /// In seconds; 0 if the lease is gone.
    #[serde(rename = "TTL", deserialize_with = "number")]
    pub(super) ttl: u64,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Watch {
    pub(super) created: bool,
    pub(super) canceled: bool,
    pub(super) cancel_reason: String,
    #[serde(deserialize_with = "number")]
    pub(super) compact_revision: Revision,
    pub(super) events: Vec<serde::de::IgnoredAny>,
}

/// A message of a stream.
#[derive(Debug, Deserialize)]
pub(super) struct Streamed<T> {
    pub(super) result: Option<T>,
    pub(super) error: Option<Refusal>,
}

/// An error, as a whole answer or in a stream. Versions of the gateway name its fields differently.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Refusal {
    #[serde(alias = "grpc_code")]
    pub(super) code: i64,
    pub(super) message: String,
}

#[derive(Debug, Deserialize)]
pub(super) struct Token {
    pub(super) token: String,
}

#[derive(Debug, Deserialize)]
pub(super) struct Status {
    pub(super) header: Header,
    #[serde(default)]
    pub(super) version: String,
    /// The leader's id; 0 if there is none.
    #[serde(default, deserialize_with = "number")]
    pub(super) leader: u64,
}

/// The only answer without a header.
#[derive(Debug, Deserialize)]
pub(super) struct Alarms {
    #[serde(default)]
    pub(super) alarms: Vec<Alarm>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Alarm {
    #[serde(rename = "memberID", deserialize_with = "number")]
    pub(super) member: u64,
    pub(super) alarm: String,
}

#[derive(Debug, Deserialize)]
pub(super) struct Members {
    #[serde(rename = "header")]
    _header: Header,
    #[serde(default)]
    pub(super) members: Vec<Member>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Member {
    #[serde(rename = "ID", deserialize_with = "number")]
    pub(super) id: u64,
    pub(super) name: String,
}
