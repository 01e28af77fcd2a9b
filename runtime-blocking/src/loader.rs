//! The loader of a synchronous engine.

use crate::asking::Asking;
use crate::binding::{BindError, Binding, EngineRank};
use crate::keeper::{Keeper, Lease};
use crate::loaded::{Fetched, LoadError, Loaded};
use crate::loading::{Loading, Stop};
use crate::options::LoaderOptions;
use crate::poller::Waker;
use crate::task::{Task, Turn, run, wait};
use std::error::Error;
use std::fmt::Display;
use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::thread;
use weightd_core::content::Generation;
use weightd_core::machine::AttachError;
use weightd_gpu::Weights;

/// Loads the weights of one rank from its daemon, or has the engine load them from disk. It blocks.
#[derive(Clone, Debug)]
pub struct Loader(Binding);

impl Loader {
    /// For this rank of an engine, with what the operator says.
    ///
    /// # Errors
    /// What makes the cache unusable for this engine, fallback or not.
    pub fn new(options: &LoaderOptions, rank: &EngineRank) -> Result<Loader, BindError> {
        Binding::new(options, rank).map(Loader)
    }

    /// What it is bound to.
    pub fn binding(&self) -> &Binding {
        &self.0
    }

    /// Loads. `build` makes the engine's model of the cache's weights; where that fails, or the cache
    /// cannot serve, `from_disk` is told why and loads the model itself. By then all that came of the cache
    /// is freed.
    ///
    /// With `fallback: false` the daemon is waited for, and `from_disk` is never called.
    ///
    /// # Errors
    /// See [`LoadError`].
    pub fn load<M, E, D>(
        &self,
        build: impl FnOnce(Weights) -> Result<M, E>,
        from_disk: impl FnOnce(&AttachError) -> Result<M, D>,
    ) -> Result<Loaded<M>, LoadError>
    where
        E: Display,
        D: Into<Box<dyn Error + Send + Sync>>,
    {
        let fetched = fetch(Loading::new(&self.0), build);
        Fetched::or_local(fetched, self.0.options.fallback)?.or_from_disk(from_disk)
    }

    /// Maps or copies the weights, for an engine that has no loader of its own at hand. With `fallback: false`
    /// the daemon is waited for.
    ///
    /// # Errors
    /// [`LoadError::Attach`] where the cache cannot serve.
    pub fn attach(&self) -> Result<Loaded<Weights>, LoadError> {
        let fetched = fetch(Loading::new(&self.0), Ok::<_, String>)?.or_error()?;
        Ok(fetched.expect("only a reload finds what the engine has"))
    }

    /// Loads what the daemon serves now. An engine that maps says the generation that it has as `current`;
    /// finding that again changes nothing and gives `None`. What is mapped anew has other addresses, so
    /// `build` makes a new model. In copy mode `build` gets the daemon's memory, and copies it into the
    /// tensors that are there with [`Weights::overwrite`], all or nothing:
    ///
    /// ```no_run
    /// # fn reload(loader: &weightd_blocking::Loader, model: &mut weightd_blocking::Weights)
    /// #     -> Result<(), weightd_blocking::LoadError> {
    /// // `model` was loaded with {"mode": "copy"}. Its addresses stay.
    /// loader.reload(model.generation(), |new| model.overwrite(&new))?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`LoadError::Attach`], also where a first load would fall back on the disk. The engine has what it had.
    pub fn reload<M, E: Display>(
        &self,
        current: Option<Generation>,
        build: impl FnOnce(Weights) -> Result<M, E>,
    ) -> Result<Option<Loaded<M>>, LoadError> {
        fetch(Loading::reload(&self.0, current), build)?.or_error()
    }

    /// How many bytes of the device the cache holds for this engine beside its own memory, for the budget of
    /// its KV-cache: those of the content in zero-copy mode, none in copy mode. Where the daemon cannot be
    /// asked and the engine may fall back, none, and a warning. An engine with a draft adds up what the loaders
    /// of both say.
    ///
    /// # Errors
    /// Without fallback, where the daemon could not be asked in time.
    pub fn external_memory(&self) -> Result<u64, LoadError> {
        match Asking::memory(&self.0)? {
            Some(mut asking) => Ok(run(&mut asking)??),
            None => Ok(0),
        }
    }
}

impl From<Binding> for Loader {
    fn from(binding: Binding) -> Loader {
        Loader(binding)
    }
}

fn fetch<M, E: Display>(
    loading: io::Result<Loading>,
    build: impl FnOnce(Weights) -> Result<M, E>,
) -> Result<Fetched<M>, LoadError> {
    let mut loading = loading?;
    let mut build = Some(build);
    let mut model = None;
    loop {
        match run(&mut loading)? {
            Stop::Build(weights) => {
                let build = build.take().expect("a load builds once");
                let built = build(weights).map(|built| model = Some(built));
                loading.built(built.map_err(|error| error.to_string()));
            }
            Stop::LoadFromDisk { because } => return Ok(Fetched::LoadFromDisk { because }),
            Stop::Unchanged => return Ok(Fetched::Loaded(None)),
            Stop::Over(fetch) => {
                let (fetch, model) = (fetch?, model.expect("a load ends well after its build"));
                return Ok(Fetched::built(model, fetch, keep));
            }
        }
    }
}

/// Keeps a lease up in a thread of its own.
pub(crate) fn keep(keeper: Keeper) -> Lease {
    Lease::kept(keeper, Keeping::start)
}

/// What ends the thread that keeps a lease up.
#[derive(Debug, Default)]
struct Keeping(Option<Arc<Waker>>, u32);

impl Keeping {
    /// Where no thread can be had, the lease is given up at once: it never fails a load.
    fn start(keeper: Keeper) -> Keeping {
        let thread = || {
            let stop = Arc::new(Waker::new()?);
            let stopped = Arc::clone(&stop);
            let builder = thread::Builder::new().name("weightd-lease".to_owned());
            builder.spawn(move || keep_until(keeper, &stopped))?;
            Ok::<_, io::Error>(stop)
        };
        match thread() {
            Ok(stop) => Keeping(Some(stop), std::process::id()),
            Err(error) => {
                tracing::warn!("the lease is given up, since no thread can keep it: {error}");
                Keeping::default()
            }
        }
    }
}

fn keep_until(mut keeper: Keeper, stop: &Waker) {
    let kept = loop {
        match keeper.turn() {
            Ok(Turn::Work(work)) => work.run().tell(&mut keeper),
            Ok(Turn::Done(())) => break Ok(()),
            Ok(Turn::Wait(timeout)) => match wait([keeper.as_fd(), stop.as_fd()], timeout) {
                Ok([_, false]) => {}
                Ok([_, true]) => break Ok(()),
                Err(error) => break Err(error),
            },
            Err(error) => break Err(error),
        }
    };
    if let Err(error) = kept {
        keeper.give_up(&error);
    }
}

impl Drop for Keeping {
    /// The thread ends by itself: waiting for it could be waiting for a listener that waits for us. In a process
    /// that was forked off, the lease is still its parent's.
    fn drop(&mut self) {
        let Keeping(stop, process) = self;
        if *process == std::process::id()
            && let Some(stop) = stop
        {
            let _ = stop.wake();
        }
    }
}
