//! A web server whose handlers are async tasks that share one `AsyncClient`. `GET /PAGE` counts a
//! visit of the page and returns the count. Any runtime will do; this is smol.
//!
//! A handler that is dropped, because its connection ended, harms nothing: its increment takes
//! effect or not, and no request of another handler waits for it.
//!
//! ```sh
//! cargo run -p farside --example web_handler shm:///run/farside/kv.sock
//! ```
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "an example shows what it does")]

use std::error::Error;

use farside::{AsyncClient, Client};
use smol::io::{AsyncReadExt, AsyncWriteExt};
use smol::net::{TcpListener, TcpStream};

/// Longer requests are refused.
const REQUEST_BYTES_MAX: usize = 4096;

/// Answers one request.
async fn handle(client: AsyncClient, mut stream: TcpStream) -> Result<(), Box<dyn Error>> {
    let mut request = vec![0; REQUEST_BYTES_MAX];
    let mut bytes = 0;
    while !request[..bytes].ends_with(b"\r\n\r\n") {
        match stream.read(&mut request[bytes..]).await? {
            0 => return Err("the request ended early, or is too long".into()),
            more => bytes += more,
        }
    }
    let line = String::from_utf8_lossy(&request[..bytes]);
    let page = line.split_whitespace().nth(1).ok_or("the request has no path")?;
    let (status, body) = match client.increment(format!("visits:{page}"), 1).await {
        Ok(visits) => ("200 OK", format!("{page}: {visits} visits\n")),
        Err(error) if error.is_retryable() => ("503 Service Unavailable", format!("{error}\n")),
        Err(error) => ("500 Internal Server Error", format!("{error}\n")),
    };
    let length = body.len();
    let answer = format!("HTTP/1.1 {status}\r\ncontent-length: {length}\r\n\r\n{body}");
    Ok(stream.write_all(answer.as_bytes()).await?)
}

fn main() -> Result<(), Box<dyn Error>> {
    let address = std::env::args().nth(1).ok_or("usage: web_handler ADDRESS")?;
    // Connecting waits, so it is done before the first task runs.
    let client = Client::builder().server(&address).connect()?.async_client()?;
    smol::block_on(async {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        println!("listening at http://{}/", listener.local_addr()?);
        loop {
            let (stream, _) = listener.accept().await?;
            let client = client.clone();
            let task = async move {
                if let Err(error) = handle(client, stream).await {
                    eprintln!("a request failed: {error}");
                }
            };
            smol::spawn(task).detach();
        }
    })
}
