//! The HTTP side: one question a connection, and bounds on all that a client can do.

use super::metrics::{CONTENT_TYPE, metrics};
use super::probe::Prober;
use super::report::report;
use hyper::body::Incoming;
use hyper::header::CONTENT_TYPE as CONTENT_TYPE_HEADER;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use std::convert::Infallible;
use std::io;
use std::net::TcpListener;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpStream;
use tokio::runtime::{Builder, Runtime};
use tokio::sync::Semaphore;
use tokio::time::{sleep, timeout};

/// Connections at a time; further ones wait in the listener's queue. Each takes a descriptor of the
/// launcher.
const CONNECTIONS: usize = 64;
/// How long a client may take to ask, and a connection may last in all.
const ASKS_WITHIN: Duration = Duration::from_secs(2);
const LASTS: Duration = Duration::from_secs(10);
/// The longest request in bytes.
const REQUEST_BYTES: usize = 16 << 10;
/// Where no connection could be accepted.
const PAUSE: Duration = Duration::from_millis(100);
/// Threads that ask daemons, and how long they stay.
const PROBES: usize = 32;
const PROBES_STAY: Duration = Duration::from_secs(1);

pub fn runtime() -> io::Result<Runtime> {
    Builder::new_current_thread()
        .enable_io()
        .enable_time()
        .max_blocking_threads(PROBES)
        .thread_keep_alive(PROBES_STAY)
        .thread_name("probe")
        .build()
}

/// Answers for ever.
pub async fn serve(listener: TcpListener, prober: Arc<Prober>) {
    let listener = tokio::net::TcpListener::from_std(listener).expect("a non-blocking listener in a runtime");
    let slots = Arc::new(Semaphore::new(CONNECTIONS));
    while let Ok(slot) = Arc::clone(&slots).acquire_owned().await {
        match listener.accept().await {
            Ok((stream, _)) => {
                let prober = Arc::clone(&prober);
                tokio::spawn(async move {
                    // Whoever is too slow finds the connection closed.
                    let _ = timeout(LASTS, converse(stream, &prober)).await;
                    drop(slot);
                });
            }
            Err(_) => sleep(PAUSE).await,
        }
    }
}

async fn converse(stream: TcpStream, prober: &Prober) -> hyper::Result<()> {
    let service = service_fn(async |request| Ok::<_, Infallible>(answer(&request, prober).await));
    http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(ASKS_WITHIN)
        .keep_alive(false)
        .max_buf_size(REQUEST_BYTES)
        .serve_connection(TokioIo::new(stream), service)
        .await
}

async fn answer(request: &Request<Incoming>, prober: &Prober) -> Response<String> {
    let text = "text/plain; charset=utf-8";
    if !matches!(*request.method(), Method::GET | Method::HEAD) {
        return response(
            StatusCode::METHOD_NOT_ALLOWED,
            text,
            "only GET and HEAD are answered\n".to_owned(),
        );
    }
    match request.uri().path() {
        "/health" => {
            let (well, body) = report(&*prober.probe().await);
            let status = if well {
                StatusCode::OK
            } else {
                StatusCode::SERVICE_UNAVAILABLE
            };
            response(status, "application/json", format!("{body}\n"))
        }
        "/metrics" => {
            let probed = prober.probe().await;
            response(
                StatusCode::OK,
                CONTENT_TYPE,
                metrics(&probed, &prober.round_trips),
            )
        }
        _ => response(
            StatusCode::NOT_FOUND,
            text,
            "there are /health and /metrics\n".to_owned(),
        ),
    }
}

fn response(status: StatusCode, content_type: &'static str, body: String) -> Response<String> {
    Response::builder()
        .status(status)
        .header(CONTENT_TYPE_HEADER, content_type)
        .body(body)
        .expect("the parts are well-formed")
}
