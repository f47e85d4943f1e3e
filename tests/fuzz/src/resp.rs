//! Target: requests of clients of redis, as kv-resp parses them, and its patterns and numbers.

use farside_resp::{
    Decimal, ParserLimits, Progress, ProtocolError, RequestParser, matches, parse_integer,
};

/// Limits that short inputs reach.
const LIMITS: ParserLimits = ParserLimits {
    arguments_max: 64,
    bulk_bytes_max: 256,
    kept_bytes_max: 32,
    request_bytes_max: 128,
};

pub(crate) fn some_requests() -> Vec<Vec<u8>> {
    [
        "*3\r\n$3\r\nset\r\n$1\r\nk\r\n$5\r\nvalue\r\n*1\r\n$4\r\nPING\r\n",
        "*2\r\n$3\r\nget\r\n$40\r\n0123456789012345678901234567890123456789\r\n",
        "set k \"a\\x41\\n\" 'it\\'s'\r\n\r\n*0\r\n*-1\r\nping\n",
    ]
    .map(|text| text.as_bytes().to_vec())
    .into()
}

/// The arguments of a request, and the length of the first one that was dropped.
type Parsed = (Vec<Vec<u8>>, Option<usize>);

/// Parses bytes that arrive in pieces of this size.
fn parse(bytes: &[u8], piece: usize) -> Result<Vec<Parsed>, ProtocolError> {
    let (mut parser, mut input, mut requests) = (RequestParser::new(LIMITS), Vec::new(), vec![]);
    for piece in bytes.chunks(piece) {
        input.extend_from_slice(piece);
        while !input.is_empty() {
            let Progress::Complete(end) = parser.parse(&mut input, 0, true)? else { break };
            assert!(end <= input.len() && parser.count() <= LIMITS.arguments_max.max(end));
            let arguments = (0..parser.count()).map(|at| parser.argument(&input, at).to_vec());
            requests.push((arguments.collect(), parser.too_long()));
            input.drain(..end);
            parser.reset();
        }
        assert!(input.len() <= LIMITS.request_bytes_max.max(bytes.len()));
    }
    Ok(requests)
}

/// Requests. Whether they arrive at once or in pieces makes no difference.
pub(crate) fn requests(bytes: &[u8]) -> bool {
    let whole = parse(bytes, bytes.len().max(1));
    for piece in [1, 3] {
        let in_pieces = parse(bytes, piece);
        assert_eq!(in_pieces, whole);
    }
    let (pattern, text) = bytes.split_at(bytes.len() / 2);
    matches(pattern, text);
    if let Some(number) = parse_integer(bytes) {
        assert_eq!(Decimal::of(number).bytes(), bytes);
    }
    whole.is_ok()
}
