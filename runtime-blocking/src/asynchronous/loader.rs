//! The loader of an async engine.

use super::Runtime;
use super::driven::{Driven, keep};
use crate::asking::Asking;
use crate::binding::{BindError, Binding, EngineRank};
use crate::loaded::{Fetched, LoadError, Loaded};
use crate::loading::{Loading, Stop};
use crate::options::LoaderOptions;
use std::error::Error;
use std::fmt;
use std::fmt::Display;
use std::io;
use std::marker::PhantomData;
use weightd_core::content::Generation;
use weightd_core::machine::AttachError;
use weightd_gpu::Weights;

/// Loads the weights of one rank from its daemon, or has the engine load them from disk.
pub struct Loader<R> {
    binding: Binding,
    runtime: PhantomData<fn() -> R>,
}

impl<R: Runtime> Loader<R> {
    /// For this rank of an engine, with what the operator says. It makes the device ready, which can take a
    /// tenth of a second; it waits for nobody.
    ///
    /// # Errors
    /// What makes the cache unusable for this engine, fallback or not.
    pub fn new(options: &LoaderOptions, rank: &EngineRank) -> Result<Loader<R>, BindError> {
        Binding::new(options, rank).map(Loader::from)
    }

    /// What it is bound to.
    pub fn binding(&self) -> &Binding {
        &self.binding
    }

    /// As [`crate::Loader::load`].
    ///
    /// # Errors
    /// See [`LoadError`].
    pub async fn load<M, E, D>(
        &self,
        build: impl FnOnce(Weights) -> Result<M, E> + Send + 'static,
        from_disk: impl FnOnce(&AttachError) -> Result<M, D> + Send + 'static,
    ) -> Result<Loaded<M>, LoadError>
    where
        M: Send + 'static,
        E: Display + Send + 'static,
        D: Into<Box<dyn Error + Send + Sync>>,
    {
        let fetched = fetch::<R, _, _>(Loading::new(&self.binding), build).await;
        match Fetched::or_local(fetched, self.binding.options.fallback)? {
            Fetched::Loaded(loaded) => Fetched::Loaded(loaded).or_from_disk(from_disk),
            disk => R::unblock(move || disk.or_from_disk(from_disk)).await?,
        }
    }

    /// As [`crate::Loader::attach`].
    ///
    /// # Errors
    /// [`LoadError::Attach`] where the cache cannot serve.
    pub async fn attach(&self) -> Result<Loaded<Weights>, LoadError> {
        let fetched = fetch::<R, _, _>(Loading::new(&self.binding), Ok::<_, String>)
            .await?
            .or_error()?;
        Ok(fetched.expect("only a reload finds what the engine has"))
    }

    /// As [`crate::Loader::reload`].
    ///
    /// # Errors
    /// [`LoadError::Attach`], also where a first load would fall back on the disk. The engine has what it had.
    pub async fn reload<M, E>(
        &self,
        current: Option<Generation>,
        build: impl FnOnce(Weights) -> Result<M, E> + Send + 'static,
    ) -> Result<Option<Loaded<M>>, LoadError>
    where
        M: Send + 'static,
        E: Display + Send + 'static,
    {
        fetch::<R, _, _>(Loading::reload(&self.binding, current), build)
            .await?
            .or_error()
    }

    /// As [`crate::Loader::external_memory`].
    ///
    /// # Errors
    /// Without fallback, where the daemon could not be asked in time.
    pub async fn external_memory(&self) -> Result<u64, LoadError> {
        match Asking::memory(&self.binding)? {
            Some(asking) => Ok(Driven::<R, _>::new(asking)?.run().await??),
            None => Ok(0),
        }
    }
}

impl<R> From<Binding> for Loader<R> {
    fn from(binding: Binding) -> Loader<R> {
        Loader {
            binding,
            runtime: PhantomData,
        }
    }
}

impl<R> Clone for Loader<R> {
    fn clone(&self) -> Loader<R> {
        Loader::from(self.binding.clone())
    }
}

impl<R> fmt::Debug for Loader<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Loader").field(&self.binding).finish()
    }
}

async fn fetch<R, M, E>(
    loading: io::Result<Loading>,
    build: impl FnOnce(Weights) -> Result<M, E> + Send + 'static,
) -> Result<Fetched<M>, LoadError>
where
    R: Runtime,
    M: Send + 'static,
    E: Display + Send + 'static,
{
    let mut loading = Driven::<R, _>::new(loading?)?;
    let mut build = Some(build);
    let mut model = None;
    loop {
        match loading.run().await? {
            Stop::Build(weights) => {
                let build = build.take().expect("a load builds once");
                let built = R::unblock(move || build(weights)).await?;
                let built = built.map(|built| model = Some(built));
                loading.task().built(built.map_err(|error| error.to_string()));
            }
            Stop::LoadFromDisk { because } => return Ok(Fetched::LoadFromDisk { because }),
            Stop::Unchanged => return Ok(Fetched::Loaded(None)),
            Stop::Over(fetch) => {
                let (fetch, model) = (fetch?, model.expect("a load ends well after its build"));
                return Ok(Fetched::built(model, fetch, keep::<R>));
            }
        }
    }
}
