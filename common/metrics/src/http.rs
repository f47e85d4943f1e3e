//! The part of HTTP that requests for metrics need. Each connection has one request.

use httparse::{EMPTY_HEADER, Error, Status};

use crate::MetricsFormat;

/// The only path with an answer.
pub(crate) const PATH: &str = "/metrics";
/// Limit on the line and the headers of a request, in bytes. Prometheus sends some 400.
pub(crate) const REQUEST_BYTES_MAX: usize = 8 << 10;
/// Limit on the headers of a request.
const HEADERS_MAX: usize = 64;

/// What the first bytes of a connection are.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Received {
    /// The beginning of a request.
    Incomplete,
    /// A request for the metrics, in this format.
    Metrics(MetricsFormat),
    /// A request that gets an error.
    Refused(Refusal),
}

/// Why a request gets an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    Malformed,
    OtherPath,
    OtherMethod,
    TooLarge,
    /// There are no metrics at present.
    Unavailable,
}

impl Refusal {
    /// Returns the response.
    pub(crate) fn response(self) -> Vec<u8> {
        let (status, text) = match self {
            Self::Malformed => ("400 Bad Request", "this is no request of HTTP/1.1\n"),
            Self::OtherPath => ("404 Not Found", "the metrics are at /metrics\n"),
            Self::OtherMethod => ("405 Method Not Allowed", "the metrics are read with GET\n"),
            Self::TooLarge => ("431 Request Header Fields Too Large", "the request is too long\n"),
            Self::Unavailable => ("503 Service Unavailable", "there are no numbers at present\n"),
        };
        let allow = if self == Self::OtherMethod { "Allow: GET\r\n" } else { "" };
        response(status, "text/plain; charset=utf-8", allow, text)
    }
}

/// Returns the response with the metrics.
pub(crate) fn metrics_response(format: MetricsFormat, text: &str) -> Vec<u8> {
    // The same address has two formats.
    response("200 OK", format.content_type(), "Vary: Accept\r\n", text)
}

fn response(status: &str, content_type: &str, headers: &str, text: &str) -> Vec<u8> {
    let bytes = text.len();
    format!(
        "HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {bytes}\r\n\
         {headers}Connection: close\r\n\r\n{text}"
    )
    .into_bytes()
}

/// Returns what these first bytes of a connection are.
pub(crate) fn parse(bytes: &[u8]) -> Received {
    let mut headers = [EMPTY_HEADER; HEADERS_MAX];
    let mut request = httparse::Request::new(&mut headers);
    match request.parse(bytes) {
        Ok(Status::Partial) if bytes.len() >= REQUEST_BYTES_MAX => {
            Received::Refused(Refusal::TooLarge)
        }
        Ok(Status::Partial) => Received::Incomplete,
        Err(Error::TooManyHeaders) => Received::Refused(Refusal::TooLarge),
        Err(_) => Received::Refused(Refusal::Malformed),
        Ok(Status::Complete(_)) => {
            let path = request.path.unwrap_or_default();
            if path.split('?').next() != Some(PATH) {
                return Received::Refused(Refusal::OtherPath);
            }
            if request.method != Some("GET") {
                return Received::Refused(Refusal::OtherMethod);
            }
            let accept =
                request.headers.iter().filter(|header| header.name.eq_ignore_ascii_case("accept"));
            // A value that is no text has no preference.
            let accept = accept.map(|header| str::from_utf8(header.value).unwrap_or_default());
            Received::Metrics(MetricsFormat::preferred(accept))
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn is_refused(bytes: &[u8], refusal: Refusal) -> bool {
        parse(bytes) == Received::Refused(refusal)
    }

    #[test]
    fn a_get_of_the_path_is_a_request_for_metrics() {
        let open = b"GET /metrics HTTP/1.1\r\naccept: application/openmetrics-text\r\n\r\n";
        assert_eq!(parse(open), Received::Metrics(MetricsFormat::OpenMetrics));
        for end in 0..open.len() {
            assert_eq!(parse(&open[..end]), Received::Incomplete, "{end}");
        }
        for request in ["GET /metrics HTTP/1.0\r\n\r\n", "GET /metrics?a=1 HTTP/1.1\r\n\r\nbody"] {
            assert_eq!(parse(request.as_bytes()), Received::Metrics(MetricsFormat::Prometheus));
        }
        let not_text = b"GET /metrics HTTP/1.1\r\nAccept: \xff\r\n\r\n";
        assert_eq!(parse(not_text), Received::Metrics(MetricsFormat::Prometheus));
    }

    #[test]
    fn everything_else_is_refused() {
        for path in ["/", "/metrics/", "/Metrics", "/metrics.txt", "//metrics", "*"] {
            let request = format!("GET {path} HTTP/1.1\r\n\r\n");
            assert!(is_refused(request.as_bytes(), Refusal::OtherPath), "{path}");
        }
        for method in ["POST", "HEAD", "DELETE", "get", "OPTIONS"] {
            let request = format!("{method} /metrics HTTP/1.1\r\n\r\n");
            assert!(is_refused(request.as_bytes(), Refusal::OtherMethod), "{method}");
        }
        for garbage in [&b"\x16\x03\x01\x02\x00\x01"[..], b"GET /metrics\r\n\r\n", b"\0\0\0\0"] {
            assert!(is_refused(garbage, Refusal::Malformed), "{garbage:?}");
        }
        let many = format!("GET /metrics HTTP/1.1\r\n{}\r\n", "a: b\r\n".repeat(100));
        assert!(is_refused(many.as_bytes(), Refusal::TooLarge));
        let long = [&b"GET /metrics?"[..], &[b'a'; REQUEST_BYTES_MAX]].concat();
        assert!(is_refused(&long[..REQUEST_BYTES_MAX], Refusal::TooLarge));
    }

    #[test]
    fn a_response_has_the_length_of_its_text() {
        let response = String::from_utf8(Refusal::OtherMethod.response()).unwrap();
        let (head, text) = response.split_once("\r\n\r\n").unwrap();
        assert!(head.starts_with("HTTP/1.1 405 Method Not Allowed\r\n"), "{head}");
        assert!(head.contains("\r\nAllow: GET\r\n"), "{head}");
        assert!(head.contains(&format!("\r\nContent-Length: {}\r\n", text.len())), "{head}");
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = parse(&bytes);
        }
    }
}
