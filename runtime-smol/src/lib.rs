//! weightd for async engines on smol, and any executor beside it: waiting is async-io's, which has a thread
//! of its own, and leases are kept up on smol's global executor.
//!
//! The same names and options as in `weightd-blocking`, where everything is explained that is not about
//! waiting. What blocks (digests, mapping, copying, the engine's own build and disk load) runs on smol's
//! blocking pool.
//!
//! Every future may be dropped at any moment: its connection closes and its descriptors with it. What runs
//! on the blocking pool then runs to its end there, and what came of it is dropped.
//!
//! ```no_run
//! use weightd_smol::{EngineRank, Loader, LoaderOptions};
//! # use weightd_smol::Weights;
//! # struct Model;
//! # impl Model {
//! #     fn over(_: Weights) -> Result<Model, String> { Ok(Model) }
//! #     fn read() -> Result<Model, std::io::Error> { Ok(Model) }
//! # }
//!
//! # fn start(rank: EngineRank) -> Result<(), Box<dyn std::error::Error>> {
//! let loader = Loader::new(&LoaderOptions::default(), &rank)?;
//! let loaded = smol::block_on(loader.load(Model::over, |_because| Model::read()))?;
//! # Ok(())
//! # }
//! ```

#![forbid(unsafe_code)]
#![deny(missing_docs)]

use smol::future::{self, or};
use smol::{Async, Timer};
use std::future::Future;
use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;
use weightd_blocking::asynchronous::{self, Runtime};

pub use weightd_blocking::asynchronous::serve;
pub use weightd_blocking::engine::*;

/// Loads the weights of one rank from its daemon, or has the engine load them from disk.
pub type Loader = asynchronous::Loader<Smol>;

/// Hands weights that the engine made itself to a daemon that takes them.
pub type Publisher = asynchronous::Publisher<Smol>;

/// smol.
#[derive(Clone, Copy, Debug)]
pub enum Smol {}

impl Runtime for Smol {
    type Waiting = Async<OwnedFd>;
    type Spawned = smol::Task<()>;

    fn register(descriptor: OwnedFd) -> io::Result<Async<OwnedFd>> {
        Async::new_nonblocking(descriptor)
    }

    async fn readable(waiting: &Async<OwnedFd>, timeout: Option<Duration>) -> io::Result<()> {
        let over = async {
            match timeout {
                None => future::pending().await,
                Some(timeout) => Timer::after(timeout).await,
            };
            Ok(())
        };
        or(waiting.readable(), over).await
    }

    async fn yield_now() {
        future::yield_now().await;
    }

    async fn unblock<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> io::Result<T> {
        Ok(smol::unblock(work).await)
    }

    fn detach(work: impl FnOnce() + Send + 'static) {
        smol::unblock(work).detach();
    }

    fn spawn(future: impl Future<Output = ()> + Send + 'static) -> smol::Task<()> {
        smol::spawn(future)
    }
}
