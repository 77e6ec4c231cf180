"""Update messages: changed rows and dense parameters, from the trainer to servers."""
