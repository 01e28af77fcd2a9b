//! A question of an engine's, asked for as long as an engine waits for its weights.

use super::ask::Ask;
use super::client::{Client, Inquiry, Step};
use super::patience::Patience;
use super::{AttachError, AttachOptions, ConnectFailure};
use crate::peer::Peer;
use crate::time::Now;
use crate::wire::Message;

/// See the module. It waits as an [`Attach`](super::Attach) with the same options does, and ends with the
/// daemon's answer, or why there is none.
#[derive(Debug)]
pub struct Query<F> {
    question: Message,
    uid: u32,
    patience: Patience,
    inquiry: Inquiry<F>,
}

impl<F> Query<F> {
    /// Asks `question`, which owns no descriptors.
    pub fn new(options: &AttachOptions, question: impl Into<Message>) -> Query<F> {
        Query {
            question: question.into(),
            uid: options.uid,
            patience: Patience::of(options),
            inquiry: Inquiry::default(),
        }
    }
}

impl<F> Client<F> for Query<F> {
    type Next = Result<Message, AttachError>;
    type Exchange = Inquiry<F>;

    fn step(&mut self, now: Now) -> Step<Self::Next> {
        self.patience.start(now);
        loop {
            let mut error = match self.inquiry.step(now).next() {
                Err(step) => return step,
                Ok(Ok(message)) => return Step::Next(Ok(message)),
                Ok(Err(none)) => AttachError::from(none),
            };
            match self.patience.again(now, &mut error) {
                Some(at) => self.inquiry.connect_at(at),
                None => return Step::Next(Err(error)),
            }
        }
    }

    fn connected(&mut self, now: Now, result: Result<Peer, ConnectFailure>) {
        let patience = self.patience.answer_by(now) - now;
        let ask = |peer| Ask::new(now, self.question.clone(), peer, self.uid, patience);
        self.inquiry.connected(result.map(ask));
    }

    fn exchange(&mut self) -> &mut Inquiry<F> {
        &mut self.inquiry
    }
}
