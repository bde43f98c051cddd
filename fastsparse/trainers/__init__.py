"Callbacks for other trainers"
