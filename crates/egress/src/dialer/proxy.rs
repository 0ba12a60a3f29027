//! Asking somebody else's proxy for a connection. The connection to the proxy itself carries no mark: it
//! may be private, the operator chose it.

use std::io;
use std::net::SocketAddrV4;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use super::upstream::{Login, Proxy};

/// Bytes of the head of a proxy's answer.
const HEAD_MAX: usize = 8 * 1024;

/// `CONNECT` to this address.
pub(super) async fn http(proxy: &Proxy, to: SocketAddrV4) -> io::Result<TcpStream> {
    let mut stream = reach(proxy).await?;
    let login = proxy.login.as_ref().map_or(String::new(), |login| {
        let Login { user, password } = login;
        let both = STANDARD.encode(format!("{user}:{password}"));
        format!("proxy-authorization: Basic {both}\r\n")
    });
    let request = format!("CONNECT {to} HTTP/1.1\r\nhost: {to}\r\n{login}\r\n");
    stream.write_all(request.as_bytes()).await?;
    let head = head(&mut stream).await?;
    let status = head.split(' ').nth(1).unwrap_or_default();
    match status {
        "200" => Ok(stream),
        status => Err(io::Error::other(format!("it answers {}", status.escape_default()))),
    }
}

/// The head of the answer and not one byte more: what follows is of the other end.
async fn head(stream: &mut TcpStream) -> io::Result<String> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        if head.len() >= HEAD_MAX {
            return Err(io::Error::other("its answer is too long"));
        }
        head.push(stream.read_u8().await?);
    }
    let head = String::from_utf8(head).map_err(|_| io::Error::other("its answer is no HTTP"))?;
    match head.starts_with("HTTP/1.") {
        true => Ok(head),
        false => Err(io::Error::other("its answer is no HTTP")),
    }
}

/// RFC 1928 and 1929.
pub(super) async fn socks5(proxy: &Proxy, to: SocketAddrV4) -> io::Result<TcpStream> {
    const NOTHING: u8 = 0;
    const PASSWORD: u8 = 2;
    let mut stream = reach(proxy).await?;
    let methods: &[u8] =
        if proxy.login.is_some() { &[5, 2, NOTHING, PASSWORD] } else { &[5, 1, NOTHING] };
    stream.write_all(methods).await?;
    let mut chosen = [0; 2];
    stream.read_exact(&mut chosen).await?;
    match (chosen, &proxy.login) {
        ([5, NOTHING], _) => {}
        ([5, PASSWORD], Some(login)) => log_in(&mut stream, login).await?,
        ([5, _], _) => return Err(io::Error::other("it does not accept how we log in")),
        _ => return Err(io::Error::other("it does not speak SOCKS5")),
    }
    let mut request = vec![5, 1, 0, 1];
    request.extend_from_slice(&to.ip().octets());
    request.extend_from_slice(&to.port().to_be_bytes());
    stream.write_all(&request).await?;
    let mut answer = [0; 4];
    stream.read_exact(&mut answer).await?;
    if answer[..2] != [5, 0] {
        return Err(io::Error::other(format!("it answers {}", answer[1])));
    }
    skip_address(&mut stream, answer[3]).await?;
    Ok(stream)
}

async fn log_in(stream: &mut TcpStream, login: &Login) -> io::Result<()> {
    let mut request = vec![1];
    for text in [&login.user, &login.password] {
        let length = u8::try_from(text.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
        request.push(length);
        request.extend_from_slice(text.as_bytes());
    }
    stream.write_all(&request).await?;
    let mut answer = [0; 2];
    stream.read_exact(&mut answer).await?;
    match answer {
        [_, 0] => Ok(()),
        _ => Err(io::Error::other("it does not accept user and password")),
    }
}

/// The address that the proxy is bound to, which nobody needs.
async fn skip_address(stream: &mut TcpStream, kind: u8) -> io::Result<()> {
    let length = match kind {
        1 => 4,
        3 => usize::from(stream.read_u8().await?),
        4 => 16,
        _ => return Err(io::Error::other("it does not speak SOCKS5")),
    };
    let mut rest = vec![0; length + 2];
    stream.read_exact(&mut rest).await?;
    Ok(())
}

async fn reach(proxy: &Proxy) -> io::Result<TcpStream> {
    let stream = TcpStream::connect((proxy.host.as_str(), proxy.port)).await?;
    stream.set_nodelay(true)?;
    Ok(stream)
}
