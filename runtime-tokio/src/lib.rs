//! weightd for async engines on tokio.
//!
//! The same names and options as in `weightd-blocking`, where everything is explained that is not about
//! waiting. What blocks (digests, mapping, copying, the engine's own build and disk load) runs on tokio's
//! blocking pool; the runtime needs its I/O and time drivers ([`enable_all`]).
//!
//! Every future may be dropped at any moment: its connection closes and its descriptors with it. What runs
//! on the blocking pool then runs to its end there, and what came of it is dropped. A lease ends with the runtime
//! that it was made in.
//!
//! ```no_run
//! use weightd_tokio::{EngineRank, Loaded, Loader, LoaderOptions};
//! # use weightd_tokio::Weights;
//! # struct Model;
//! # impl Model {
//! #     fn over(_: Weights) -> Result<Model, String> { Ok(Model) }
//! #     fn read() -> Result<Model, std::io::Error> { Ok(Model) }
//! # }
//!
//! # async fn start(rank: EngineRank) -> Result<(), Box<dyn std::error::Error>> {
//! let loader = Loader::new(&LoaderOptions::default(), &rank)?;
//! let loaded = loader.load(Model::over, |_because| Model::read()).await?;
//! if let Loaded::Mapped { lease: Some(lease), .. } = &loaded {
//!     lease.on_event(|event| eprintln!("{event}"));
//! }
//! # Ok(())
//! # }
//! ```
//!
//! [`enable_all`]: tokio::runtime::Builder::enable_all

#![forbid(unsafe_code)]
#![deny(missing_docs)]

use std::future::Future;
use std::io;
use std::os::fd::OwnedFd;
use std::panic::resume_unwind;
use std::time::Duration;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::runtime::Handle;
use tokio::task::AbortHandle;
use weightd_blocking::asynchronous::{self, Runtime};

pub use weightd_blocking::asynchronous::serve;
pub use weightd_blocking::engine::*;

/// Loads the weights of one rank from its daemon, or has the engine load them from disk.
pub type Loader = asynchronous::Loader<Tokio>;

/// Hands weights that the engine made itself to a daemon that takes them.
pub type Publisher = asynchronous::Publisher<Tokio>;

/// tokio. All that is awaited must be awaited inside one of its runtimes.
#[derive(Clone, Copy, Debug)]
pub enum Tokio {}

impl Runtime for Tokio {
    type Waiting = AsyncFd<OwnedFd>;
    type Spawned = Spawned;

    // Deprecated since a type may change its descriptor behind its back, which an `OwnedFd` does not.
    #[allow(deprecated)]
    fn register(descriptor: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
        AsyncFd::with_interest(descriptor, Interest::READABLE)
    }

    async fn readable(waiting: &AsyncFd<OwnedFd>, timeout: Option<Duration>) -> io::Result<()> {
        let readable = async {
            waiting.readable().await?.clear_ready();
            Ok(())
        };
        match timeout {
            None => readable.await,
            Some(timeout) => tokio::time::timeout(timeout, readable).await.unwrap_or(Ok(())),
        }
    }

    async fn yield_now() {
        tokio::task::yield_now().await;
    }

    async fn unblock<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> io::Result<T> {
        let done = tokio::task::spawn_blocking(work).await;
        done.map_err(|error| match error.try_into_panic() {
            Ok(panic) => resume_unwind(panic),
            Err(_) => io::Error::other("the tokio runtime is shutting down"),
        })
    }

    fn detach(work: impl FnOnce() + Send + 'static) {
        match Handle::try_current() {
            Ok(runtime) => drop(runtime.spawn_blocking(work)),
            Err(_) => work(),
        }
    }

    fn spawn(future: impl Future<Output = ()> + Send + 'static) -> Spawned {
        Spawned(tokio::spawn(future).abort_handle())
    }
}

/// A future in the background, which ends with this.
#[derive(Debug)]
pub struct Spawned(AbortHandle);

impl Drop for Spawned {
    fn drop(&mut self) {
        self.0.abort();
    }
}
