//! Publications by clients: on to the vault, and answered when what it stored is served here.

use super::{ConnId, Server, ServerEvent};
use crate::content::Generation;
use crate::machine::check_descriptors;
use crate::machine::descriptors::taken;
use crate::machine::reap::Bundle;
use crate::peer::Facts;
use crate::time::Now;
use crate::wire::message::{DaemonId, ErrorCode, Failure, Publish, Published};
use std::sync::Arc;

/// A publication under way; of each daemon there is one at a time.
#[derive(Debug)]
pub(super) struct Publication {
    /// The request that the vault has to answer.
    asked: u32,
    /// The publisher's process.
    pid: u32,
    /// The publisher's connection and request, as long as it waits.
    pub waiter: Option<(ConnId, u32)>,
    /// What the vault made of it, which arms this server next.
    stored: Option<Generation>,
    /// What the publisher is to hear.
    outcome: Option<Result<Generation, Failure>>,
}

impl<F> Server<F> {
    /// Passes a client's content on to the vault, which alone decides.
    pub(super) fn publish(
        &mut self,
        id: ConnId,
        on: DaemonId,
        request: u32,
        publish: Publish,
        descriptors: &mut Vec<(Facts, F)>,
    ) {
        let checked = check_descriptors(&publish.content, descriptors.iter().map(|(facts, _)| facts));
        let descriptors: Bundle<F> = Arc::new(taken(descriptors));
        // Closed here once the vault has its own.
        self.reaper.bury(Arc::clone(&descriptors), None);
        let (Some(daemon), Some(conn)) = (self.daemons.get(&on), self.conns.get(&id)) else {
            return;
        };
        let pid = conn.peer.pid;
        if daemon.info.publish.is_none() {
            let why =
                "this daemon takes its content from its launcher only: publish to one of `weightd serve`";
            return self.refuse(id, request, ErrorCode::NotAllowed, why);
        }
        if let Err(error) = checked {
            return self.expel(id, request, ErrorCode::BadDescriptors, &error.to_string());
        }
        if daemon.publication.is_some() {
            let why = "something else is being published here just now: ask for the status, and try again";
            return self.refuse(id, request, ErrorCode::Busy, why);
        }
        let relayed = Publish {
            daemon: on,
            ..publish
        };
        let Some(asked) = self.ask_leader(relayed, Some(descriptors)) else {
            let why = "the launcher of this daemon has ended, so nothing can be stored: \
                       start `weightd serve` again, which adopts it, and try again";
            return self.refuse(id, request, ErrorCode::Busy, why);
        };
        if let Some(conn) = self.conns.get_mut(&id) {
            conn.waiting = true;
        }
        if let Some(daemon) = self.daemons.get_mut(&on) {
            daemon.publication = Some(Publication {
                asked,
                pid,
                waiter: Some((id, request)),
                stored: None,
                outcome: None,
            });
        }
    }

    /// The vault holds what it was asked to; arming this server comes next on the same connection.
    pub(super) fn stored(&mut self, request: u32, published: &Published) {
        for publication in self.publications(request) {
            publication.stored = Some(published.generation);
        }
    }

    /// The vault does not take it.
    pub(super) fn not_stored(&mut self, request: u32, failure: &Failure) {
        for publication in self.publications(request) {
            publication.outcome = Some(Err(failure.clone()));
        }
    }

    fn publications(&mut self, request: u32) -> impl Iterator<Item = &mut Publication> {
        let publications = self
            .daemons
            .values_mut()
            .flat_map(|daemon| &mut daemon.publication);
        publications.filter(move |publication| publication.asked == request)
    }

    /// A daemon serves what the vault armed it with. Only now does its publisher hear of it, so that it finds
    /// what it is told of.
    pub(super) fn served(&mut self, on: DaemonId, generation: Generation) {
        let Some(daemon) = self.daemons.get_mut(&on) else {
            return;
        };
        let (content, publication) = (daemon.content(), &daemon.publication);
        let (Some(content), Some(publication)) = (content, publication) else {
            return;
        };
        if publication.stored != Some(generation) {
            return;
        }
        let published = ServerEvent::Published {
            daemon: on,
            pid: publication.pid,
            generation,
            tensors: content.info.tensors,
            bytes: content.info.bytes(),
        };
        if let Some(publication) = &mut daemon.publication {
            publication.outcome = Some(Ok(generation));
        }
        self.event(published);
    }

    /// The launcher is gone, and whatever it stored and did not hand over with it.
    pub(super) fn nobody_stores(&mut self) {
        let publications = self
            .daemons
            .values_mut()
            .flat_map(|daemon| &mut daemon.publication);
        for publication in publications {
            let message = "the launcher ended before it answered, so the content may be stored or not: \
                           ask for the status, and publish again if it is not";
            publication.outcome.get_or_insert_with(|| {
                Err(Failure {
                    code: ErrorCode::InDoubt.number(),
                    retryable: true,
                    message: message.to_owned(),
                })
            });
        }
    }

    /// Answers the publications that are done; returns the connections that got an answer.
    pub(super) fn answer_publications(&mut self, now: Now) -> Vec<ConnId> {
        let done: Vec<(DaemonId, Publication)> = self
            .daemons
            .iter_mut()
            .filter_map(|(&daemon, state)| {
                let publication = &mut state.publication;
                let done = publication.take_if(|publication| publication.outcome.is_some())?;
                Some((daemon, done))
            })
            .collect();
        let mut answered = Vec::new();
        for (daemon, done) in done {
            let (Some((id, request)), Some(outcome)) = (done.waiter, done.outcome) else {
                continue;
            };
            match outcome {
                Ok(generation) => self.answer(now, id, request, Published { daemon, generation }),
                Err(failure) => {
                    if let Some(state) = self.daemons.get_mut(&daemon) {
                        state.tally.refused(failure.code);
                    }
                    self.answer(now, id, request, failure);
                }
            }
            answered.push(id);
        }
        answered
    }
}
