//! Who may come in.

use farside_config::{Secret, ServerConfig};
use farside_control::{ConnectRequest, Refusal, Role, Token};

/// What clients must show.
pub(crate) struct Tokens {
    everything: Option<Token>,
    reading: Option<Token>,
}

impl Tokens {
    pub(crate) fn new(config: &ServerConfig) -> Self {
        let token = |secret: &Secret| Token::of(&secret.0);
        Self {
            everything: config.secret.as_ref().map(token),
            reading: config.reader_secret.as_ref().map(token),
        }
    }

    /// Whether a client may do what it wants to.
    pub(crate) fn admit(&self, request: &ConnectRequest) -> Result<(), Refusal> {
        let Some(everything) = &self.everything else { return Ok(()) };
        // Both are always compared, so that the time does not tell which one was close.
        let reads = self.reading.is_some_and(|token| token.matches(&request.token));
        let may = everything.matches(&request.token) | (reads && request.role == Role::Reader);
        if may { Ok(()) } else { Err(Refusal::Credentials) }
    }
}
